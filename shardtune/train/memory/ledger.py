"""Who held the memory when it ran out? Phases of a step, their marks, and the count at the moment of the failure."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardtune.model.families.generic import decoder_of
from shardtune.parallel.shard import layers_of
from shardtune.train.memory.allocator import Allocator, observe_shortage
from shardtune.train.memory.held import known_parts

if TYPE_CHECKING:
    from peft import PeftModel

PARTS = ("weights", "gathered", "adapters", "gradients", "optimizer", "activations", "loss", "other")
LOADING, DATA, FORWARD, LOSS, BACKWARD = "loading", "data", "forward", "loss", "backward"
OPTIMIZER, EVALUATION, SAVING = "optimizer", "evaluation", "saving"


@dataclass(frozen=True)
class Shortfall:
    """The count at the moment an allocation failed. The parts add up to what the allocator had given out."""

    phase: str
    step: int
    capacity: int
    wanted: int
    free: int
    held: dict[str, int]
    layers_done: int | None

    @property
    def biggest(self) -> str:
        return max(self.held, key=self.held.__getitem__)


@dataclass
class _Marks:
    """What was allocated where nothing else was alive yet. None: not there yet."""

    at_begin: int | None = None  # of a step: shards, optimizer state, and what is nobody's
    with_optimizer: bool = False  # there was optimizer state then
    gathered: int = 0  # layers that were gathered then
    after_layers: int | None = None  # the forward pass has left the last layer
    loss_is_over: bool = False  # the backward pass has come back to the last layer
    layers_done: int = 0


class Ledger:
    """Follows a run through its phases, and counts when memory runs out.

    Shards, gathered layers, gradients and optimizer state are counted where they are. What else the allocator has given
    out is distinguished by when it came: what was there before the step is `other`, what came until the last layer is
    `activations`, what came after it `loss`. A mark is one question to the allocator, twice in a micro-batch.
    """

    def __init__(self, allocator: Allocator | None, device: torch.device) -> None:
        self.allocator, self.device = allocator, device
        self.phase, self.step = LOADING, 0
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.layers = 0
        self.noted: Shortfall | None = None
        self._marks = _Marks()
        self._evaluated = False  # since the last step
        if allocator is not None and device.type == "cuda":
            _observe(self)

    def watch(self, model: PeftModel) -> None:
        """From here on the model is counted; its layers and the end of them are marked."""
        self.model = model
        layers = layers_of(model)
        self.layers = len(layers)
        for layer in layers:
            layer.register_forward_hook(self._after_layer)
        decoder_of(model.get_base_model()).register_forward_hook(self._after_layers)

    def enter(self, phase: str) -> None:
        self.phase = phase

    # What the loop does.

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.phase = optimizer, DATA

    def begin_step(self, step: int) -> None:
        self.step, self.phase = step, FORWARD
        self._marks = self._begin()
        self._evaluated = False

    def begin_micro_batch(self) -> None:
        """Any but a step's first one."""
        self.phase = FORWARD
        self._marks = replace(self._marks, after_layers=None, loss_is_over=False, layers_done=0)

    def begin_evaluation_batch(self) -> None:
        if self.phase != EVALUATION:
            self._marks = self._begin()
        self.phase, self._evaluated = EVALUATION, True
        self._marks.layers_done, self._marks.after_layers = 0, None

    def _begin(self) -> _Marks:
        # Only an evaluation leaves anything gathered (embeddings and head, until the next backward pass).
        gathered = known_parts(self.model, None, self.device)["gathered"] if self._evaluated else 0
        has_state = self.optimizer is not None and bool(self.optimizer.state)
        return _Marks(at_begin=self._allocated(), with_optimizer=has_state, gathered=gathered)

    def _after_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a recomputation in the backward pass
            self._marks.layers_done += 1

    def _after_layers(self, body: nn.Module, args: Any, output: Any) -> None:
        if self.phase not in (FORWARD, EVALUATION):
            return
        self._marks.after_layers = self._allocated()
        if self.phase == FORWARD:
            self.phase = LOSS
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(self._loss_is_over)

    def _loss_is_over(self, gradient: torch.Tensor) -> None:
        self._marks.loss_is_over = True

    def _allocated(self) -> int | None:
        return self.allocator.allocated() if self.allocator is not None else None

    # When it fails.

    def note(self, wanted: int) -> Shortfall:
        """Count now, and keep the result."""
        known = known_parts(self.model, self.optimizer, self.device)
        total = sum(known.values())
        allocated = self._allocated()
        held = self._shared_out(known, total if allocated is None else allocated)
        allocator = self.allocator
        self.noted = Shortfall(
            phase=self.phase,
            step=self.step,
            capacity=allocator.capacity() if allocator is not None else 0,
            wanted=wanted,
            free=allocator.free() if allocator is not None else 0,
            held=held,
            layers_done=self._marks.layers_done if self.phase == FORWARD else None,
        )
        return self.noted

    def _shared_out(self, known: dict[str, int], allocated: int) -> dict[str, int]:
        """All that is allocated, by part; what is left over is `other`."""
        marks = self._marks
        rest = max(0, allocated - sum(known.values()))
        there = known["weights"] + known["adapters"] + (known["optimizer"] if marks.with_optimizer else 0)
        there += marks.gathered
        base = max(0, marks.at_begin - there) if marks.at_begin is not None else rest
        other = min(rest, base)
        passing = rest - other
        held = {**dict.fromkeys(PARTS, 0), **known, "other": other}
        if self.phase in (LOADING, DATA, SAVING):
            held["other"] += passing
        elif self.phase == OPTIMIZER:
            held["optimizer"] += passing  # its intermediate results; activations are gone by then
        elif marks.after_layers is not None and not marks.loss_is_over:
            held["loss"] = min(passing, max(0, allocated - marks.after_layers))
            held["activations"] = passing - held["loss"]
        else:
            held["activations"] = passing
        return held


_watched: weakref.ref[Ledger] | None = None


def _observe(ledger: Ledger) -> None:
    """One observer for the life of the process (torch cannot detach it), for the ledger of the run it is in."""
    global _watched
    first, _watched = _watched is None, weakref.ref(ledger)
    if first:
        observe_shortage(_tell_current)


def _tell_current(device: int, wanted: int, capacity: int, free: int) -> None:
    # `free` is the whole device's, also where this process may use a part of it only: the ledger asks for itself.
    ledger = _watched() if _watched is not None else None
    if ledger is not None and device == ledger.device.index:
        ledger.note(wanted)
