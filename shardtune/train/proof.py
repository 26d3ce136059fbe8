"""Does what was meant to train really train, and nothing else? Looked at on every rank in the first steps of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Adamax

from shardtune import terminal
from shardtune.errors import ShardtuneError
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import Processes

if TYPE_CHECKING:
    from torch.optim import Optimizer

# A shard of experts may see no token in a step; after this many steps it is reported as unproven instead of waited for.
_PATIENCE = 20
_PIECE = 1 << 21


class ProofOfTraining:
    """Checks, for every shard on its rank: adapters received a gradient and changed, frozen weights did not.

    A's gradient is zero by construction while B is zero, so B is proven in the first step and A in the next. Steps
    whose learning rate is zero (the first of a warm-up) prove gradients but no change, and updates too small to move
    A's values are waited out. A shard of routed experts without a token waits for one. Changes are seen by checksums
    (`checksum`), not by copies.

    Not called for steps that a guard leaves out: they prove nothing, and disprove nothing.

    Raises, on all ranks together and naming the parameter, when an adapter has no gradient, has one and does not
    change, or a frozen weight does. Afterwards it costs nothing.
    """

    def __init__(self, console: Console, events: EventLog, processes: Processes) -> None:
        self.console, self.events, self.processes = console, events, processes
        self.frozen: dict[str, int] = {}
        self.waiting: dict[str, torch.Tensor] = {}  # adapter shards that have not changed yet
        self.shards = 0
        self.before: dict[str, int] = {}
        self.moved: set[str] = set()  # those with a gradient in this step
        self.steps = 0  # with a learning rate
        self.first_step = 0
        self.done = False

    def begin(self, model: nn.Module, first_step: int) -> None:
        self.model, self.first_step = model, first_step
        self.frozen = {name: checksum(p) for name, p in _owned(model) if not p.requires_grad}
        self.waiting = {name: p for name, p in _owned(model) if p.requires_grad}
        self.shards = len(self.waiting)
        self.steps, self.done = 0, False

    def before_optimizer(self, step: int) -> None:
        if self.done:
            return
        without = [name for name, p in self.waiting.items() if p.grad is None]
        self._stop_if(f"'{without[0]}' received no gradient" if without else "", step)
        flags = [local(p.grad).count_nonzero() for p in self.waiting.values() if p.grad is not None]
        nonzero = torch.stack(flags).tolist() if flags else []
        self.moved = {name for name, count in zip(self.waiting, nonzero, strict=True) if count}
        self.before = {name: checksum(self.waiting[name]) for name in self.moved}
        still = [name for name in self.waiting if name not in self.moved and not _may_wait(name, self.steps)]
        self._stop_if(f"the gradient of '{still[0]}' is zero everywhere" if still else "", step)

    def after_optimizer(self, step: int, optimizer: Optimizer) -> None:
        if self.done:
            return
        if not any(group["lr"] for group in optimizer.param_groups):
            return
        self.steps += 1
        same = [name for name in self.moved if checksum(self.waiting[name]) == self.before[name]]
        self.moved -= {name for name in same if _too_small(self.waiting[name], optimizer)}
        same = [name for name in same if name in self.moved]
        self._stop_if(f"'{same[0]}' received a gradient and did not change" if same else "", step)
        for name in self.moved:
            del self.waiting[name]
        if self.steps == 1 or not self.processes.agree(bool(self.waiting)) or self.steps >= _PATIENCE:
            # The checksum of everything is taken after the first step, and again when all is proven.
            held = [(name, p) for name, p in _owned(self.model) if name in self.frozen]
            touched = [name for name, p in held if checksum(p) != self.frozen[name]]
            self._stop_if(f"'{touched[0]}' is frozen, and was changed" if touched else "", step)
        if not self.processes.agree(bool(self.waiting)) or self.steps >= _PATIENCE:
            self._tell(step)

    def end(self, step: int) -> None:
        if not self.done and self.steps:
            self._tell(step)  # a run too short to prove A

    def _stop_if(self, problem: str, step: int) -> None:
        """Raise on every rank if any rank found something."""
        found = self.processes.all_gather(problem)
        rank = next((rank for rank, text in enumerate(found) if text), None)
        if rank is None:
            return
        self.events.write("proof", ok=False, problem=found[rank], rank=rank, step=step)
        raise ShardtuneError(
            f"Training check failed: {found[rank]} in step {step} (rank {rank}).",
            why="Every shard of an adapter must receive a gradient and change, and no frozen weight may.",
            fix="A learning rate that is far too high can do this: check the loss. Otherwise please report it, with "
            "the config and the first lines of the log.",
        )

    def _tell(self, last: int) -> None:
        counts = torch.tensor([self.shards - len(self.waiting), self.shards, len(self.frozen)])
        dist.all_reduce(counts, group=self.processes.control)
        proven, shards, frozen = counts.tolist()
        text = f"{proven:,} of {shards:,} adapter shards got a gradient and changed"
        if proven < shards:
            text += " (the rest received no gradient yet, or an update too small to see)"
        text += f"; none of {frozen:,} frozen shards did"
        ranks = terminal.count(self.processes.world_size, "rank")
        steps = f"step {last}" if self.first_step == last else f"steps {self.first_step}–{last}"
        terminal.say(self.console, "checked", f"{text} ({steps}, {ranks})")
        self.events.write(
            "proof", ok=True, proven=proven, shards=shards, frozen=frozen, step=last,
            unproven=sorted(self.waiting)[:20],
        )  # fmt: skip
        self.waiting, self.frozen, self.before, self.moved, self.done = {}, {}, {}, set(), True


def checksum(tensor: torch.Tensor) -> int:
    """One number for the bytes of this rank's shard: read as 64-bit integers, each weighted by its place, summed up.

    One changed value changes it; small changes up and down do not cancel out, as they do in a plain sum; and nothing
    large is copied.
    """
    flat = local(tensor).detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    pieces = (*flat[:whole].view(torch.int64).split(_PIECE), flat[whole:].to(torch.int64))
    weights = _weights_of_places(flat.device)
    return int(torch.stack([(part * weights[: len(part)]).sum() for part in pieces]).sum())


@lru_cache(maxsize=1)
def _weights_of_places(device: torch.device) -> torch.Tensor:
    """Random odd numbers: odd, so that no change of a value is multiplied away."""
    drawn = torch.randint(-(2**62), 2**62, (_PIECE,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _owned(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters of which this rank holds anything (with many ranks a small one may have shards without a row)."""
    return [(name, parameter) for name, parameter in model.named_parameters() if local(parameter).numel()]


def _may_wait(name: str, steps: int) -> bool:
    """Whether a gradient of zero is no sign of trouble: A before B has changed, experts without a token, a new token
    or a row of a trained embedding that the step did not have."""
    return (
        ".experts." in name
        or ".modules_to_save." in name
        or ".trainable_tokens_delta." in name
        or (".lora_A." in name and steps == 0)
    )


def _too_small(parameter: torch.Tensor, optimizer: Optimizer) -> bool:
    """Whether an update may be lost in the rounding of the values: early in a long warm-up B is next to nothing, and
    with it the gradient of A."""
    group = next((one for one in optimizer.param_groups if any(p is parameter for p in one["params"])), None)
    if group is None or parameter.grad is None:
        return False
    update = _largest_update(optimizer, group, float(local(parameter.grad).abs().max()))
    values = local(parameter).detach().abs()
    return update < 4 * torch.finfo(values.dtype).eps * float(values.max())


def _largest_update(optimizer: Optimizer, group: dict[str, Any], gradient: float) -> float:
    """What a gradient that is the first of its size moves a value by; 0 where that hangs on settings and state (such as
    Adagrad's sum, or RAdam's first steps), so that a shard counts as unproven and no run is stopped by mistake."""
    if isinstance(optimizer, Adam | Adamax):  # AdamW, too
        return float(group["lr"] * gradient / (gradient + group["eps"]))
    if isinstance(optimizer, SGD):
        return float(group["lr"] * gradient * (1 - group["dampening"]))
    return 0.0
