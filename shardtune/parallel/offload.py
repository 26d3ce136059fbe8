"""How are activations offloaded to host memory? The inputs of checkpointed layers, copied while other layers compute.

With full activation checkpointing the inputs of all layers are what a step keeps. Each is copied into pinned memory
while the next layers compute, and copied back while the layer after it is recomputed. torch's own `save_on_cpu` makes
the device wait for every copy; TRL's offloading moves whatever any layer saves.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardtune.config.schema import ParallelSection

if TYPE_CHECKING:
    from peft import PeftModel

_KEEP_LAST = 2  # the last inputs of a forward pass are needed first: they stay on the device


def has_device_memory(device: torch.device) -> bool:
    """Does the device have memory of its own, so that offloading to the host frees any?"""
    return device.type == "cuda"


def offloads_params(section: ParallelSection, device: torch.device) -> bool:
    """Are parameters kept in host memory and copied to the device layer by layer?"""
    return section.offload_params is True and has_device_memory(device)


class OffloadedInputs(saved_tensors_hooks):
    """A context for forward passes whose layers are checkpointed, and for their backward passes.

    What is saved inside of a checkpointed layer does not get here: that is computed again. What does are the layers'
    inputs, and some of what stands around the layers.

    Args:
        width: Of the residual stream; nothing of another width is moved.
        device: Where the layers compute.
    """

    least = 1 << 20  # bytes that are worth a copy

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(self._pack, self._unpack)
        self.width, self.device = width, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        # autograd holds what is moved, for as long as its backward pass is to come.
        self._last: deque[ReferenceType[_Offloaded]] = deque(maxlen=_KEEP_LAST + 1)

    def _pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        if not self._moves(tensor):
            return tensor
        moved = _Offloaded(tensor, before=self._last[-1] if self._last else None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._copies is not None)
        moved.copied = self._copy(tensor, host)
        moved.host = host
        self._last.append(ref(moved))
        if len(self._last) > _KEEP_LAST and (oldest := self._last[0]()) is not None:
            self._release(oldest)
        return moved

    def _moves(self, tensor: Tensor) -> bool:
        return (
            tensor.dim() == 3
            and tensor.shape[-1] == self.width
            and tensor.device.type == self.device.type
            and tensor.is_floating_point()
            and tensor.is_contiguous()
            and tensor.nbytes >= self.least
            and not isinstance(tensor, nn.Parameter)
        )

    def _release(self, moved: _Offloaded) -> None:
        """Free the device's memory: its copy was started two inputs ago, so it is usually done."""
        if moved.tensor is not None:
            moved.wait()
            moved.tensor = None

    def _unpack(self, packed: Tensor | _Offloaded) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        before = packed.before() if packed.before is not None else None
        if before is not None:
            self._fetch(before)  # needed next, when the layer before this one is computed again
        packed.wait()
        assert packed.tensor is not None
        return packed.tensor

    def _fetch(self, moved: _Offloaded) -> None:
        if moved.tensor is None and moved.host is not None:
            # Allocated on the stream of the layers, which also frees it: its memory is reusable by them after that.
            tensor = torch.empty(moved.host.shape, dtype=moved.host.dtype, device=self.device)
            moved.copied = self._copy(moved.host, tensor)
            moved.tensor = tensor

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Beside the layers, once all that was asked of the device before is done; returns when that will be."""
        if self._copies is None:
            target.copy_(source)
            return None
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            done: torch.cuda.Event = self._copies.record_event()
        return done


class _Offloaded:
    """A tensor that is on the device, on the host, or being copied between them."""

    def __init__(self, tensor: Tensor, before: ReferenceType[_Offloaded] | None) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.host: Tensor | None = None
        self.before = before  # what was saved before it, and is needed after it
        self.copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """What the device is asked for from now on comes after the copy."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None

    def __del__(self) -> None:
        self.wait()  # its memory goes back to those who compute, who must not write into it before


def offload_context(model: PeftModel, device: torch.device, *, enabled: bool) -> AbstractContextManager[object]:
    """What `train.offload_activations` puts around forward and backward passes; nothing on a CPU."""
    if not enabled or not has_device_memory(device):
        return nullcontext()
    return OffloadedInputs(model.config.get_text_config().hidden_size, device)
