"""How long does the computation wait for other ranks? FSDP2's waits, each between two marks.

On a GPU, all-gathers and reduce-scatters run in their own streams; what counts is how long the compute stream is
blocked by them. On a CPU the collectives block, and the whole call counts. The patched attributes are private names of
torch (checked with 2.11 to 2.13); where one is missing, nothing is measured and `why_not` is the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_NAMES = ("wait_for_unshard", "device_handle", "_all_gather_result", "_all_gather_comm", "_reduce_scatter_comm")
Wait = Callable[[Callable[[], Any]], Any]  # runs what it is given between two marks


class CollectiveTap:
    """Calls `wait` around every wait of a sharded model.

    Args:
        model: Sharded with `fully_shard`; for any other nothing is patched.
        on_cuda: Whether waiting happens on a stream or in a call.
    """

    def __init__(self, model: nn.Module, wait: Wait, *, on_cuda: bool) -> None:
        self.why_not: str | None = None
        self._undo: list[Callable[[], None]] = []
        groups = list(_groups(model))
        if not groups:
            self.why_not = "the model is not sharded with FSDP2"
            return
        missing = sorted({name for group in groups for name in _NAMES if not hasattr(group, name)})
        if missing:
            self.why_not = f"torch {torch.__version__} has no {', '.join(missing)} in its FSDP2"
            return
        for group in groups:
            if on_cuda:
                self._tap_streams(group, wait)
            else:
                for name in ("_all_gather_comm", "_reduce_scatter_comm"):
                    self._put(group, name, _TimedCall(getattr(group, name), wait))

    @property
    def is_open(self) -> bool:
        return bool(self._undo)

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _tap_streams(self, group: Any, wait: Wait) -> None:
        original = group.wait_for_unshard

        def wait_for_unshard() -> None:
            # Waits for the layer's parameters here: FSDP2's own wait, and the copying after it, find them there.
            result = group._all_gather_result
            event, work = getattr(result, "all_gather_event", None), getattr(result, "all_gather_work", None)
            if event is not None:
                wait(lambda: torch.cuda.current_stream().wait_event(event))
            if work is not None:
                wait(work.wait)
            original()

        self._put(group, "wait_for_unshard", wait_for_unshard)
        self._put(group, "device_handle", _TimedDevice(group.device_handle, wait))  # reduced gradients

    def _put(self, group: Any, name: str, new: object) -> None:
        in_instance, old = name in vars(group), getattr(group, name)

        def undo() -> None:
            if in_instance:
                setattr(group, name, old)
            else:
                delattr(group, name)

        setattr(group, name, new)
        self._undo.append(undo)


class _TimedCall:
    """A blocking collective. Everything else is delegated to the original."""

    def __init__(self, original: Any, wait: Wait) -> None:
        self._original, self._wait = original, wait

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wait(lambda: self._original(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _TimedDevice:
    """`torch.cuda` as FSDP2 uses it, with a current stream whose waits are timed."""

    def __init__(self, original: Any, wait: Wait) -> None:
        self._original, self._wait = original, wait

    def current_stream(self, *args: Any) -> _TimedStream:
        return _TimedStream(self._original.current_stream(*args), self._wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _TimedStream:
    def __init__(self, original: Any, wait: Wait) -> None:
        self._original, self._wait = original, wait

    def wait_event(self, event: Any) -> None:
        self._wait(lambda: self._original.wait_event(event))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _groups(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            one = getattr(state, "_fsdp_param_group", None)
            found += several if several is not None else [one] if one is not None else []
    return found
