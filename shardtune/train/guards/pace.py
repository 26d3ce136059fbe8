"""How fast is this rank by itself? Its own forward computation, without waiting for others, and its wait for data."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from shardtune.parallel.shard import layers_of


class OwnForward:
    """Times the layers' forward passes while `armed`, from the moment their weights are gathered.

    All ranks wait for each other in every gather, so that whole steps take the same time on a slow rank and on the
    others. What happens between two gathers is a rank's own. On CUDA the time is taken on the device, by events.
    A recomputation in the backward pass is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.armed = device, False
        self.tokens = 0
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._first: nn.Module | None = None

    def watch(self, model: nn.Module) -> None:
        """FSDP2's hooks were there first, so these run when the weights are gathered, and after they are resharded."""
        layers = layers_of(model)
        self._first = layers[0] if layers else None
        for layer in layers:
            layer.register_forward_pre_hook(self._before, with_kwargs=True)
            layer.register_forward_hook(self._after)

    def arm(self) -> None:
        self.armed, self.tokens = True, 0
        self._spans.clear()

    def seconds_per_token(self) -> float | None:
        """Of the steps since `arm`; None when nothing was timed."""
        self.armed = False
        if not self._spans or not self.tokens:
            return None
        if self.device.type == "cuda":
            self._spans[-1][1].synchronize()  # of a forward pass whose loss was read already
            total = sum(began.elapsed_time(ended) for began, ended in self._spans) / 1000
        else:
            total = sum(ended - began for began, ended in self._spans)
        return float(total) / self.tokens

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._counts():
            return
        if layer is self._first:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.tokens += hidden.shape[:-1].numel()
        self._began = self._mark()

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._counts() and self._began is not None:
            self._spans.append((self._began, self._mark()))
            self._began = None

    def _counts(self) -> bool:
        return self.armed and torch._C._current_graph_task_id() == -1  # -1: not inside a backward pass
