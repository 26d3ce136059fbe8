"""What is alive that we know of? Shards, gathered layers, adapters, gradients, optimizer state: each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

KNOWN = ("weights", "gathered", "adapters", "gradients", "optimizer")


def known_parts(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> dict[str, int]:
    """Bytes on `device` by part. Reads sizes alone, so that it may be asked in the middle of anything."""
    count = _Once(device)
    if model is None:
        return dict.fromkeys(KNOWN, 0)
    held = list(_held(model))
    managed = {id(p) for one in held for p in (one.sharded_param, getattr(one, "_unsharded_param", None))}
    loose = [p for p in model.parameters() if id(p) not in managed]
    frozen = [one._sharded_param_data for one in held if not one.sharded_param.requires_grad]
    trained = [one._sharded_param_data for one in held if one.sharded_param.requires_grad]
    return {
        "weights": count([*frozen, *(p for p in loose if not p.requires_grad), *model.buffers()]),
        "adapters": count([*trained, *(p for p in loose if p.requires_grad)]),
        "gradients": count([*_gradients(held), *(p.grad for p in loose)]),
        "optimizer": count(_states(optimizer)),
        "gathered": count(_gathered(model, held)),
    }


class _Once:
    """Adds up storages on one device, each only once, whatever shares it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seen = device, set[int]()

    def __call__(self, tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if local.device != self._device or not storage.size() or storage.data_ptr() in self._seen:
                continue
            self._seen.add(storage.data_ptr())
            total += storage.nbytes()
        return total


def _held(model: nn.Module) -> Iterator[Any]:
    """FSDP2's record of every parameter: its shard is not what `parameters()` shows while a layer is gathered."""
    for group in _groups(model):
        yield from group.fsdp_params


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            yield group


def _gradients(held: list[Any]) -> Iterator[torch.Tensor | None]:
    """Shards, and whole ones that wait to be reduced (or for the last micro-batch of a step)."""
    for one in held:
        yield one.sharded_param.grad
        yield one.unsharded_accumulated_grad
        whole = getattr(one, "_unsharded_param", None)
        yield whole.grad if whole is not None else None


def _gathered(model: nn.Module, held: list[Any]) -> Iterator[torch.Tensor]:
    for one in held:
        yield from one.all_gather_outputs
        yield from getattr(one, "_unsharded_inner_tensors", ())
        if hasattr(one, "_unsharded_param"):
            yield one._unsharded_param
    for group in _groups(model):
        pending = getattr(group, "_all_gather_result", None)
        kept = getattr(getattr(group, "comm_ctx", None), "all_gather_state", None)
        for result in (pending, kept.all_gather_result if kept is not None else None):
            if result is not None:
                yield result.all_gather_output


def _states(optimizer: torch.optim.Optimizer | None) -> Iterator[Any]:
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from state.values()
