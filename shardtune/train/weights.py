"""How do ranks load a checkpoint? Find it on every rank, choose a strategy, then load each rank's own slices only."""

from __future__ import annotations

import hashlib
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from shardtune.adapters.initialization import init_adapters, init_new_tokens
from shardtune.config.schema import ModelSection
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.model.load import model_folder
from shardtune.model.random_weights import init_random_base
from shardtune.model.safetensors_headers import StoredTensor, read_headers
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import (
    LocalShard,
    local_shards,
    materialize,
    read_and_send,
    receive_shards,
)
from shardtune.observe.host_meter import host_peak_bytes
from shardtune.parallel.exchange import tensor_from_spec, tensor_spec
from shardtune.parallel.processes import Processes
from shardtune.train.divided_reading import Readers, choose_readers, read_divided, split

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.model.meta_model import MetaModel
    from shardtune.model.new_tokens import NewTokens
    from shardtune.parallel.mesh import Mesh

LoadStrategy = Literal["auto", "read-all", "read-once", "rank0-broadcast", "random"]
_SMALL_FILE = 64 << 20
_SMALL = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
_MESSAGE = 256 << 20  # gloo sends are cut to this


@dataclass(frozen=True)
class Checkpoint:
    """Where the model's files are for this rank, their tensors, and which ranks read them (`auto`: not known yet)."""

    folder: Path
    stored: Mapping[str, StoredTensor]
    strategy: LoadStrategy


@dataclass(frozen=True)
class LoadStats:
    """What loading cost on this rank.

    Attributes:
        readers: Ranks that divided the reading of this rank's rows; 1 = it read them all itself.
        bytes_received: From those ranks.
        disk_rate, link_rate: Bytes per second, where they were measured to choose the readers.
    """

    strategy: LoadStrategy
    bytes_read: int
    seconds: float
    local_bytes: int
    peak_host_bytes: int
    readers: int = 1
    bytes_received: int = 0
    disk_rate: float | None = None
    link_rate: float | None = None
    quantisation_error: float | None = None
    worst_quantised: str = ""


def find_checkpoint(section: ModelSection, processes: Processes) -> Checkpoint:
    """Look for the checkpoint on every rank, and choose which ranks read it.

    Raises:
        UserInputError: rank 0 does not have it, or another rank does not and `model.load` says that it reads.
        ShardtuneError: the ranks have different checkpoints.
    """
    missing: UserInputError | None = None
    if section.weights == "random":
        return Checkpoint(model_folder(section), {}, "random")
    try:
        folder = model_folder(section)
        stored = read_headers(folder)
    except UserInputError as error:
        missing, folder, stored = error, Path(), {}
    if processes.share_from_main(missing is not None):
        raise missing or UserInputError(
            "Rank 0 has no complete checkpoint of the model.",
            fix="See rank 0's own message; its node needs the files whatever model.load is.",
        )
    lacking = processes.agree(missing is not None)
    if lacking and section.load in ("read-all", "read-once"):
        raise missing or UserInputError(
            f"A rank cannot read the model's files, and model.load is {section.load}.",
            fix="Make the files available on every node, or set model.load to auto or rank0-broadcast.",
        )
    if lacking or section.load == "rank0-broadcast":
        folder, stored = _copy_from_rank0(folder, stored, processes, lacks=missing is not None)
        return Checkpoint(folder, stored, "rank0-broadcast")
    mine = _fingerprint(stored)
    if processes.agree(mine != processes.share_from_main(mine)):
        raise ShardtuneError(
            "The nodes have different checkpoints of the model.",
            why=f"Rank {processes.rank} has {len(stored)} tensors in '{folder}' (fingerprint {mine}).",
            fix="Copy the same files to every node, or set model.load: rank0-broadcast.",
        )
    return Checkpoint(folder, stored, section.load)


def load_sharded_weights(
    model: PeftModel,
    meta_model: MetaModel,
    strategy: LoadStrategy,
    processes: Processes,
    mesh: Mesh,
    seed: int,
    on_progress: Callable[[int, int], None],
    *,
    on_host: bool,
    new_tokens: NewTokens | None = None,
) -> LoadStats:
    """Give a sharded model on the meta device its memory, its weights, its buffers and its adapters.

    Args:
        on_progress: Called with bytes that are here and bytes to come here, also from reading threads.
        on_host: Parameters are kept in host memory although the device is a GPU (`parallel.offload_params`).
        new_tokens: Tokens whose rows train.
    """
    began = time.perf_counter()
    device = torch.device("cpu") if on_host else processes.device
    materialize(model, meta_model.model, device, buffers=processes.device)
    if strategy == "random":
        return _init_random(model, meta_model, processes, seed, began, new_tokens)
    own = local_shards(model, meta_model.mapping)
    total, received, readers = 0, 0, Readers((processes.rank,), None)
    with ShardReader(meta_model.mapping, on_progress=lambda done: on_progress(done, total)) as reader:
        if strategy == "rank0-broadcast":
            total = meta_model.mapping.bytes
            _load_from_rank0(own, reader, processes)
        else:
            parts = split(own, reader)
            total = sum(part.nbytes for part in parts)
            if strategy != "read-all":
                readers = choose_readers(parts, reader, mesh, processes, measure=strategy == "auto")
            strategy = "read-once" if len(readers.ranks) > 1 else "read-all"
            received = read_divided(
                parts, reader, readers, processes, lambda others: on_progress(reader.progress.bytes + others, total)
            )
    _init_adapters(model, seed, new_tokens, processes)
    if processes.device.type == "cuda":
        torch.cuda.synchronize(processes.device)
    error = reader.error
    return LoadStats(
        strategy=strategy,
        bytes_read=reader.progress.bytes,
        seconds=time.perf_counter() - began,
        local_bytes=sum(t.nbytes for shard in own for t in (shard.into, shard.scale_into) if t is not None),
        peak_host_bytes=host_peak_bytes(),
        readers=len(readers.ranks),
        bytes_received=received,
        disk_rate=readers.disk_rate,
        link_rate=readers.link_rate,
        quantisation_error=error.relative if error.size else None,
        worst_quantised=f"{error.worst[1]} ({error.worst[0]:.2%})" if error.size else "",
    )


def _init_adapters(model: PeftModel, seed: int, new_tokens: NewTokens | None, processes: Processes) -> None:
    _refuse_different_adapters(init_adapters(model, seed), processes)
    if new_tokens is not None:
        init_new_tokens(model, new_tokens, processes.control)


def _init_random(
    model: PeftModel,
    meta_model: MetaModel,
    processes: Processes,
    seed: int,
    began: float,
    new_tokens: NewTokens | None,
) -> LoadStats:
    local_bytes = init_random_base(model, seed, getattr(meta_model.model.config, "initializer_range", 0.02))
    _init_adapters(model, seed, new_tokens, processes)
    if processes.device.type == "cuda":
        torch.cuda.synchronize(processes.device)
    return LoadStats("random", 0, time.perf_counter() - began, local_bytes, host_peak_bytes())


def _load_from_rank0(own: list[LocalShard], reader: ShardReader, processes: Processes) -> None:
    """Rank 0 reads for all ranks and sends each its slices; no other rank opens the files."""
    plans = processes.gather([_shard_to_json(shard) for shard in own])

    def send(tensor: torch.Tensor, rank: int) -> None:
        for part in tensor.reshape(-1).view(torch.uint8).split(_MESSAGE):
            dist.send(part, rank, group=processes.control)

    def receive(tensor: torch.Tensor) -> None:
        for part in tensor.view(-1).view(torch.uint8).split(_MESSAGE):
            dist.recv(part, 0, group=processes.control)

    if processes.is_main:
        theirs = [[_shard_from_json(shard) for shard in plan] for plan in plans[1:]]
        read_and_send([own, *theirs], reader, send)
    else:
        receive_shards(own, receive)


def _shard_to_json(shard: LocalShard) -> dict[str, Any]:
    scale = shard.scale_into
    return {
        "name": shard.name,
        "rows": list(shard.rows),
        "into": tensor_spec(shard.into),
        "scales_of": shard.scales_of,
        "scale_into": None if scale is None else tensor_spec(scale),
    }


def _shard_from_json(spec: dict[str, Any]) -> LocalShard:
    first, end = spec["rows"]
    scale = spec["scale_into"]
    into, scale_into = tensor_from_spec(spec["into"]), None if scale is None else tensor_from_spec(scale)
    return LocalShard(spec["name"], (first, end), into, spec["scales_of"], scale_into)


def _copy_from_rank0(
    folder: Path, stored: dict[str, StoredTensor], processes: Processes, *, lacks: bool
) -> tuple[Path, dict[str, StoredTensor]]:
    """Rank 0's headers, and for a rank without the files a folder with its small ones (config, tokenizer)."""
    small: dict[str, Any] = {
        file.name: b64encode(file.read_bytes()).decode("ascii")
        for file in (folder.iterdir() if processes.is_main else ())
        if file.is_file() and file.name.endswith(_SMALL) and file.stat().st_size <= _SMALL_FILE
    }
    headers = [_stored_to_json(tensor) for tensor in stored.values()] if processes.is_main else []
    shared: dict[str, Any] = processes.share_from_main({"small": small, "headers": headers})
    if lacks:
        folder = Path(tempfile.mkdtemp(prefix="shardtune-model-"))
        for name, content in shared["small"].items():
            (folder / Path(name).name).write_bytes(b64decode(content))
    return folder, {tensor.name: tensor for tensor in map(_stored_from_json, shared["headers"])}


def _stored_to_json(tensor: StoredTensor) -> dict[str, Any]:
    return {**vars(tensor), "file": str(tensor.file), "shape": list(tensor.shape)}


def _stored_from_json(spec: dict[str, Any]) -> StoredTensor:
    return StoredTensor(**{**spec, "file": Path(spec["file"]), "shape": tuple(spec["shape"])})


def _refuse_different_adapters(fingerprint: str, processes: Processes) -> None:
    """Sharding keeps each rank's own slice: adapters that differ between ranks would be mixed."""
    if processes.agree(fingerprint != processes.share_from_main(fingerprint)):
        raise ShardtuneError(
            "The initial adapters differ between ranks.",
            why=f"Rank {processes.rank} drew different values from the same seed.",
            fix="Use the same torch and peft versions on every node.",
        )


def _fingerprint(stored: Mapping[str, StoredTensor]) -> str:
    """Of names, shapes, dtypes and places: different files almost always differ here, and no weight has to be read."""
    text = "\n".join(
        f"{name} {tensor.dtype} {tensor.shape} {tensor.file.name} {tensor.offset}"
        for name, tensor in sorted(stored.items())
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
