"""Run on ranks by test_sharded_weights.py: bring models in sharded, and write what this rank holds and what it cost."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection, ModelSection, ParallelSection
from shardtune.model.meta_model import build_meta_model
from shardtune.model.quantized import use_fp8_storage
from shardtune.model.safetensors_headers import StoredTensor
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import unwrapped_name
from shardtune.observe.host_meter import host_peak_bytes
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import Processes, join
from shardtune.parallel.shard import shard_model
from shardtune.train import divided_reading
from shardtune.train.build import fp8_blocks
from shardtune.train.divided_reading import Part, Readers
from shardtune.train.weights import find_checkpoint, load_sharded_weights


def main(cases: str, out: str, nodes: str = "") -> None:
    """Args:
    nodes: Of each rank, where they are to count as several.
    """
    section = ParallelSection(device="cpu")
    if nodes:
        os.environ["GROUP_RANK"] = nodes.split(",")[int(os.environ["RANK"])]
    with join(section) as processes:
        for name, case in json.loads(cases).items():
            seen = bring_in_case(case, section, processes)
            (Path(out) / f"{name}-rank{processes.rank}of{processes.world_size}.json").write_text(json.dumps(seen))


def bring_in_case(case: dict, section: ParallelSection, processes: Processes) -> dict:
    folder = case.get("folders", {}).get(str(processes.rank)) or case["model"]["model_name_or_path"]
    model_section = ModelSection(**{**case["model"], "model_name_or_path": folder})
    checkpoint = find_checkpoint(model_section, processes)
    meta_model = build_meta_model(model_section, checkpoint.folder, checkpoint.stored)
    if model_section.base_precision == "fp8":
        use_fp8_storage(meta_model.model, fp8_blocks(meta_model))
    model, *_ = add_lora(meta_model.model, LoraSection(lora_dropout=0, **case.get("lora", {})), meta_model.family)
    mesh = build_mesh(processes, case.get("shards"), shard_adapters=case.get("shards") == 1)
    shard_model(model, section, mesh, None)
    progress: list[tuple[int, int]] = []
    with slow_disk(case.get("disk_bytes_per_second")), slow_network(case.get("network_bytes_per_second")):
        loaded = load_sharded_weights(
            model, meta_model, checkpoint.strategy, processes, mesh, 7,
            lambda done, total: progress.append((done, total)), on_host=False,
        )  # fmt: skip
    return {
        "way": loaded.strategy,
        "bytes_read": loaded.bytes_read,
        "readers": loaded.readers,
        "rates": [loaded.disk_rate, loaded.link_rate],
        "progress": progress[-1] if progress else None,
        "local_bytes": loaded.local_bytes,
        "peak": host_peak_bytes(),
        "own_folder": str(checkpoint.folder) == folder,
        "shards": {
            own_name(name): digest(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        },
    }


@contextmanager
def slow_disk(rate: float | None) -> Iterator[None]:
    """Every read takes as long as from a disk of this speed, and is long enough for nodes to measure it."""
    if rate is None:
        yield
        return
    read, lock = ShardReader._read, threading.Lock()

    def slowly(reader: ShardReader, stored: StoredTensor, skip: int, into: torch.Tensor) -> None:
        with lock:
            time.sleep(into.nbytes / rate)
        read(reader, stored, skip, into)

    with mock.patch.object(ShardReader, "_read", slowly), mock.patch.object(divided_reading, "_SOON", 0.0):
        yield


@contextmanager
def slow_network(rate: float | None) -> Iterator[None]:
    """Broadcasts among all replicas seem to be this slow; those within a node are as they are."""
    if rate is None:
        yield
        return
    measured = divided_reading._time_broadcast

    def slower(parts: list[Part], readers: Readers, processes: Processes) -> float:
        seen = measured(parts, readers, processes)
        return seen if readers.temporary else rate

    with mock.patch.object(divided_reading, "_time_broadcast", slower):
        yield


def own_name(name: str) -> str:
    """As in the bare model; an adapter keeps its name (those of two expert tensors differ by `base_layer` alone)."""
    return name if "lora_" in name else unwrapped_name(name)


def digest(tensor: torch.Tensor) -> str:
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    raw = held.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(str(tuple(held.shape)).encode() + raw.tobytes()).hexdigest()
