"""Where do forward and backward begin and end? Hooks on the model, on what it returns, and in the autograd engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardtune.observe.phases import StepTimer


class PassHooks:
    """Reports the passes of every micro-batch to a timer.

    Forward is the call of the model, including losses it computes itself. Backward lasts from the first gradient of
    the model's output to the end of autograd's work, including FSDP2's last waits. What follows counts as the
    optimizer until another forward pass begins.

    Args:
        is_training: Passes count only while it returns True (an evaluation has forward passes, too).
        begun: Called with the shape of `input_ids` when a forward pass with gradients begins.
    """

    def __init__(
        self,
        model: nn.Module,
        timer: StepTimer,
        is_training: Callable[[], bool],
        begun: Callable[[tuple[int, ...] | None], None],
    ) -> None:
        self.timer, self.is_training, self.begun = timer, is_training, begun
        # First and last: FSDP2 gathers in its own hook, which belongs to the pass.
        self._handles = [
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]
        self._backward_is_awaited = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not self.is_training():
            return
        self.timer.drop()  # the time since the last backward pass was not the optimizer's
        if torch.is_grad_enabled():
            ids = kwargs.get("input_ids", args[0] if args else None)
            self.begun(tuple(ids.shape) if isinstance(ids, Tensor) else None)
        self.timer.enter("forward")

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.timer.phase != "forward":
            return
        self.timer.leave()
        self._backward_is_awaited = True
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient)

    def _on_gradient(self, _: Tensor) -> None:
        if not self._backward_is_awaited:
            return
        self._backward_is_awaited = False
        self.timer.enter("backward")
        # FSDP2 ends its backward pass in such a callback, too. One queued by another comes after all of them.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._on_backward_end))

    def _on_backward_end(self) -> None:
        if self.timer.phase == "backward":
            self.timer.leave()
            self.timer.enter("optimizer")


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        items: Iterable[Any] = output.values()
    elif isinstance(output, tuple | list):
        items = output
    else:
        items = vars(output).values() if hasattr(output, "__dict__") else ()
    return [item for item in items if isinstance(item, Tensor)]
