"""What does a run say when memory runs out? What held it, on which rank and in which phase, and what would help."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from shardtune.errors import ShardtuneError
from shardtune.observe.events import EventLog
from shardtune.plan.memory_advice import MemoryAdvice, ModelFacts, Shortage, advise
from shardtune.run.exit_codes import OUT_OF_MEMORY
from shardtune.terminal import size
from shardtune.train.memory.allocator import ran_out, wanted_in
from shardtune.train.memory.ledger import Ledger, Shortfall

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.parallel.processes import Processes

_NAMES = {
    "weights": "frozen weights (this rank's shard)", "gathered": "gathered layers", "adapters": "adapters",
    "gradients": "gradients", "optimizer": "optimizer", "activations": "activations", "loss": "loss and logits",
    "other": "other",
}  # fmt: skip
_PHASES = {
    "loading": "while the model was loaded", "data": "between two steps", "forward": "in the forward pass",
    "loss": "in the loss", "backward": "in the backward pass", "optimizer": "in the optimizer",
    "evaluation": "in an evaluation", "saving": "while a checkpoint was saved",
}  # fmt: skip


class OutOfMemory(ShardtuneError):
    """The GPU of a rank is too small for this run: starting it again as it is would end the same way."""

    exit_code = OUT_OF_MEMORY
    code = "out-of-memory"


class MemoryAnswer:
    """A block in which running out of device memory is answered; everything else passes through."""

    def __init__(self, ledger: Ledger, events: EventLog, processes: Processes, config: RunConfig) -> None:
        self.ledger, self.events, self.processes = ledger, events, processes
        self.config = config  # replaced as the autos are settled

    def __enter__(self) -> MemoryAnswer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shortage = None if isinstance(error, ShardtuneError) else ran_out(error)
        if shortage is None:
            return
        found = self.ledger.noted or self.ledger.note(wanted_in(str(shortage)))
        answer = advise(
            Shortage(found.phase, found.held, found.wanted, found.free, found.capacity, found.layers_done),
            self.config,
            self._model(),
            self.processes.world_size,
        )
        self._write(found, answer)
        raise self._error(found, answer) from shortage

    def _model(self) -> ModelFacts:
        model = self.ledger.model
        hidden = getattr(getattr(model, "config", None), "hidden_size", 0)
        frozen = [p for p in model.parameters() if not p.requires_grad] if model is not None else []
        count = sum(p.numel() for p in frozen)
        total = sum(p.numel() * p.element_size() for p in frozen)
        return ModelFacts(
            layers=max(1, self.ledger.layers), hidden=hidden, weight_bytes=total / count if count else 2.0
        )

    def _write(self, found: Shortfall, answer: MemoryAdvice) -> None:
        self.events.write(
            "out_of_memory",
            phase=found.phase,
            step=found.step,
            capacity=found.capacity,
            wanted=found.wanted,
            free=found.free,
            held=found.held,
            advice=[one.event() for one in answer.advice],
        )

    def _error(self, found: Shortfall, answer: MemoryAdvice) -> OutOfMemory:
        step = f" of step {found.step}" if found.phase in ("forward", "loss", "backward", "optimizer") else ""
        free = f", {size(found.free)} of {size(found.capacity)} were free" if found.capacity else ""
        what = (
            f"Rank {self.processes.rank} ran out of GPU memory {_PHASES[found.phase]}{step}: failed to allocate "
            f"{size(found.wanted)}{free}."
        )
        largest = sorted(found.held.items(), key=lambda part: -part[1])
        held = ", ".join(f"{_NAMES[part]} {size(count)}" for part, count in largest if count)
        lines = [
            f"{number}. {one.setting}: {one.value} frees about {size(one.frees)}. {one.text}"
            for number, one in enumerate(answer.advice, 1)
        ]
        return OutOfMemory(what, why=f"In use: {held}.", fix="\n       ".join([answer.verdict, *lines]))
