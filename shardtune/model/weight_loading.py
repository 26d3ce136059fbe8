"""How are sharded weights loaded? Each rank reads the rows it holds; buffers that no file has are computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardtune.errors import ShardtuneError
from shardtune.model.shard_reader import ReadJob, ShardReader
from shardtune.model.stored_names import SCALE
from shardtune.model.weight_mapping import WeightMapping, tied_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LocalShard:
    """The rows of one parameter that this rank holds.

    Args:
        name: The parameter's name in the base model, without the prefixes of PEFT and FSDP.
        rows: The range of its first dimension.
        into: Where they go.
        scales_of: The weight whose grid of scales this is.
        scale_into: The rows of its scales, where the weight is quantised while it is read.
    """

    name: str
    rows: tuple[int, int]
    into: torch.Tensor
    scales_of: str | None = None
    scale_into: torch.Tensor | None = None


def materialize(
    model: nn.Module,
    base: PreTrainedModel,
    device: torch.device,
    *,
    buffers: torch.device | None = None,
    left_out: Collection[nn.Parameter] = (),
) -> None:
    """Give a model that was built on the meta device its memory, and its buffers their values.

    Buffers that no file holds (RoPE's frequencies) are computed by the model's own code. They are poisoned before: one
    that the code does not set is named, where it would otherwise hold whatever lay in memory.

    Args:
        device: Where parameters live.
        buffers: Where layers compute, if that is elsewhere: sharding brings parameters there, and no buffer.
        left_out: Parameters that stay on the meta device.
    """
    computed = set(_buffers_without_file(base))
    tied = tied_parameters(base)
    kept = {id(parameter) for parameter in left_out}
    model._apply(lambda tensor: tensor if id(tensor) in kept else torch.empty_like(tensor, device=device))
    if buffers is not None and buffers != device:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=buffers)
    for name, same in tied.items():  # each name got memory of its own
        owner, _, attribute = name.rpartition(".")
        base.get_submodule(owner)._parameters[attribute] = base.get_parameter(same)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # else _init_weights draws them at random
    poisoned = {name: buffer for name, buffer in base.named_buffers() if name in computed}
    for buffer in poisoned.values():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min)
    # Also what stands above a buffer's owner: Falcon-H1's model sets those of its layers. The deepest first.
    for owner in sorted({above for name in computed for above in _above(name)}, key=lambda name: -name.count(".")):
        base._init_weights(base.get_submodule(owner))
    for name, buffer in base.named_buffers():
        bad = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
        if name in computed and bool(bad.any()):
            raise ShardtuneError(
                f"The buffer '{name}' of {type(base).__name__} has no value.",
                why="It is in no file, and the model's code computes it only in its constructor.",
                fix="Please report this with the model's name.",
            )


def _above(name: str) -> list[str]:
    """Names of the modules that a tensor of this name lies in, but for the whole model."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _buffers_without_file(base: PreTrainedModel) -> Iterator[str]:
    for prefix, module in base.named_modules():
        for name in module._non_persistent_buffers_set:
            if module._buffers[name] is not None:
                yield f"{prefix}.{name}" if prefix else name


def local_shards(model: nn.Module, mapping: WeightMapping) -> list[LocalShard]:
    """What this rank has to load: every parameter and stored buffer except the adapters.

    Raises:
        ShardtuneError: the model has a parameter that the mapping does not contain.
    """
    named = [(unwrapped_name(name), tensor) for name, tensor in _tensors(model)]
    by_name = dict(named)
    found = []
    for name, tensor in named:  # what trains in full is there twice, as it was and as it becomes
        weight = name.removesuffix(SCALE)
        if name not in mapping.pieces and weight != name and weight in by_name:
            if weight in mapping.quantised:  # otherwise filled together with the weight it belongs to
                found.append(LocalShard(name, *local_rows(tensor), scales_of=weight))
            continue
        if name not in mapping.pieces and mapping.same.get(name) in mapping.pieces:
            name = mapping.same[name]  # a head that an adapter has untied begins as the embedding
        if name not in mapping.pieces:
            raise ShardtuneError(f"No checkpoint tensor is mapped to '{name}'.", fix="Please report this.")
        (first, end), into = local_rows(tensor)
        stored = max(piece.rows[1] for piece in mapping.pieces[name])
        if end > stored:  # an embedding that has grown for new tokens
            end, into = max(first, stored), into[: max(0, stored - first)]
        quantise = tensor.dtype == torch.float8_e4m3fn and name not in mapping.quantised
        scale_into = local_rows(by_name[name + SCALE])[1] if quantise else None
        found.append(LocalShard(name, (first, end), into, scale_into=scale_into))
    return [shard for shard in found if shard.rows[0] < shard.rows[1]]


def load_shards(own: list[LocalShard], reader: ShardReader) -> None:
    """Read this rank's shards from the files."""
    grids = [(shard.scales_of, shard) for shard in own if shard.scales_of is not None]
    with ThreadPoolExecutor(max_workers=reader.threads) as pool:  # small reads: latency dominates
        list(pool.map(lambda grid: reader.scales(grid[0], grid[1].rows, grid[1].into), grids))
    reader.run(read_jobs(own, reader))


def read_jobs(own: list[LocalShard], reader: ShardReader) -> list[ReadJob]:
    """What has to be read for these shards, scales not counted."""
    weights = [shard for shard in own if shard.scales_of is None]
    return [job for shard in weights for job in reader.jobs(shard.name, shard.rows, shard.into, shard.scale_into)]


def unwrapped_name(name: str) -> str:
    """A parameter's name in the model as transformers builds it."""
    bare = name.removeprefix("base_model.model.")
    for around in (".token_adapter", ".base_layer", ".original_module", ".modules_to_save.default"):
        bare = bare.replace(around, "")
    return bare


def is_adapter(name: str) -> bool:
    """Does no checkpoint hold this parameter, because PEFT has put it beside the model's own?"""
    return "lora_" in name or ".trainable_tokens_delta." in name


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield name, parameter
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def local_rows(tensor: torch.Tensor) -> tuple[tuple[int, int], torch.Tensor]:
    """The rows of the first dimension this rank holds of `tensor`, and their memory."""
    if not isinstance(tensor, DTensor):
        return (0, tensor.shape[0] if tensor.dim() else 1), tensor.detach()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return (offset[0], offset[0] + shape[0]), tensor.to_local().detach()


def read_and_send(
    plans: list[list[LocalShard]], reader: ShardReader, send: Callable[[torch.Tensor, int], None]
) -> None:
    """Rank 0's side of `rank0-broadcast`: load its own shards, then read every other rank's and send them, in order.

    Args:
        plans: For each rank its shards; `into` (and `scale_into`) are meta tensors for ranks other than 0.
        send: Sends a CPU tensor to a rank.
    """
    load_shards(plans[0], reader)
    for rank, plan in enumerate(plans[1:], start=1):
        for shard in plan:
            into = torch.empty_like(shard.into, device="cpu")
            scale_into = torch.empty_like(shard.scale_into, device="cpu") if shard.scale_into is not None else None
            load_shards([LocalShard(shard.name, shard.rows, into, shard.scales_of, scale_into)], reader)
            for tensor in (into, scale_into):
                if tensor is not None:
                    send(tensor, rank)


def receive_shards(own: list[LocalShard], receive: Callable[[torch.Tensor], None]) -> None:
    """Another rank's side: receive its shards in the order of its plan."""
    for shard in own:
        for into in (shard.into, shard.scale_into):
            if into is not None:
                arrived = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
                receive(arrived)
                if arrived is not into:
                    into.copy_(arrived)
