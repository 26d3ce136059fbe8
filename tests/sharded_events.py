"""When is a sharded layer gathered, computed and let go? Records it at FSDP2's own seams, for tests and benchmarks.

The seams are private names of torch (2.13 read); one that is missing is an AttributeError here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

ROOT = -1  # the unit of embeddings, final norm and head
Mark = Any  # a time on the host's clock, or an event in a stream


@dataclass
class Event:
    """Something that happened to a unit. Of `gather`, `began` is when it was issued; `pass_` is forward or backward.

    kind: gather, wait (the computation stands still for a gather), compute, reduce, reshard.
    """

    kind: str
    unit: int
    pass_: str
    began: Mark
    ended: Mark | None = None


class Recorder:
    """Writes down what a model does that was sharded with `shard_model`; `events` is in the order of beginnings.

    On a CPU times are the host's. On a GPU they are CUDA events: of gathers in the stream they run in, of the rest in
    the stream that computes (the current one when this is made). `times` makes seconds of either.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module], *, on_cuda: bool = False) -> None:
        self.events: list[Event] = []
        self._stream = torch.cuda.current_stream() if on_cuda else None
        self._on_cuda = on_cuda
        self._open: dict[tuple[int, str], Event] = {}
        for number, layer in enumerate(layers):
            self._watch_module(number, layer)
            self._watch_group(number, layer)
        self._watch_module(ROOT, model)
        self._watch_group(ROOT, model)

    def clear(self) -> None:
        self.events.clear()

    def times(self, origin: Mark) -> list[tuple[str, int, str, float, float]]:
        """(kind, unit, pass, began, ended) in seconds since `origin`, a `mark` made before."""
        return [
            (e.kind, e.unit, e.pass_, self.seconds(origin, e.began), self.seconds(origin, e.ended or e.began))
            for e in self.events
        ]

    def seconds(self, began: Mark, ended: Mark) -> float:
        if not self._on_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def mark(self) -> Mark:
        """Now, as the computation sees it."""
        return self._mark_in(self._stream)

    def _mark_in(self, stream: Any) -> Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _add(self, kind: str, unit: int, began: Mark | None = None) -> Event:
        pass_ = "backward" if _in_backward() else "forward"
        event = Event(kind, unit, pass_, self.mark() if began is None else began)
        self.events.append(event)
        return event

    def _watch_module(self, number: int, module: nn.Module) -> None:
        def begins(*_: object) -> None:
            if not _in_backward():  # where a layer is computed again, its backward pass has begun
                self._open[number, "forward"] = self._add("compute", number)

        def ends(*_: object) -> None:
            if not _in_backward():
                self._open[number, "forward"].ended = self.mark()

        def watch_gradient(_module: nn.Module, _args: object, output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]  # of the whole model, the loss
            if tensor.requires_grad and not _in_backward():
                tensor.register_hook(goes_back)  # FSDP2's own hook on this tensor was there before, and runs before

        def goes_back(_gradient: Tensor) -> None:
            self._open[number, "backward"] = self._add("compute", number)

        # FSDP2's hook before forward is the first, its hook after forward was the last until now.
        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends, prepend=True)
        module.register_forward_hook(watch_gradient)

    def _watch_group(self, number: int, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        group: Any = module._get_fsdp_state()._fsdp_param_group
        reshard, post_backward, wait_for_unshard = group.reshard, group.post_backward, group.wait_for_unshard

        def watched_reshard() -> None:
            was_whole = group.is_unsharded
            reshard()
            if was_whole and not group.is_unsharded:
                self._add("reshard", number)

        def watched_post_backward(*unused: Any) -> None:
            if event := self._open.pop((number, "backward"), None):
                event.ended = self.mark()
            post_backward(*unused)

        def watched_wait() -> None:
            result = group._all_gather_result
            work, event = getattr(result, "all_gather_work", None), getattr(result, "all_gather_event", None)
            if work is not None or (self._on_cuda and event is not None):
                waiting = self._add("wait", number)
                if work is not None:
                    work.wait()
                else:
                    self._stream.wait_event(event)  # type: ignore[union-attr]
                waiting.ended = self.mark()
            wait_for_unshard()

        group.reshard, group.post_backward, group.wait_for_unshard = (
            watched_reshard,
            watched_post_backward,
            watched_wait,
        )
        group._all_gather_comm = _Watched(group._all_gather_comm, lambda call: self._gather(number, call))
        group._reduce_scatter_comm = _Watched(group._reduce_scatter_comm, lambda call: self._reduce(number, call))

    def _gather(self, number: int, call: Callable[[], Any]) -> Any:
        event = self._add("gather", number, self._mark_in(None))
        waiting = self._add("wait", number)  # a call that blocks is time lost, and so is issuing one
        work = call()
        waiting.ended = self.mark()
        event.ended = self._mark_in(None)
        if work is not None and not self._on_cuda:

            def done(_future: object) -> None:
                event.ended = time.perf_counter()

            work.get_future().add_done_callback(done)
        return work

    def _reduce(self, number: int, call: Callable[[], Any]) -> Any:
        event = self._add("reduce", number, self._mark_in(None))
        work = call()
        event.ended = self._mark_in(None)
        return work


class _Watched:
    """A collective, called within `around`. Whatever else is asked of it, the original answers."""

    def __init__(self, original: Any, around: Callable[[Callable[[], Any]], Any]) -> None:
        self._original, self._around = original, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(lambda: self._original(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
