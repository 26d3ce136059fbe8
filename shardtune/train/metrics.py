"""What does a log line show? Sums over the steps since the last one; they survive a checkpoint between two lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shardtune.parallel.processes import Processes


@dataclass
class StepTotals:
    """What one rank has counted in one step, or in many.

    Attributes:
        sums: (3,) float64 on the device: entropy of the predictions, correct ones, routers' auxiliary loss.
    """

    sums: torch.Tensor
    supervised: int = 0
    micro_batches: int = 0
    real_tokens: int = 0

    @classmethod
    def zero(cls, device: torch.device) -> StepTotals:
        return cls(torch.zeros(3, dtype=torch.float64, device=device))

    def add_micro_batch(
        self, token_stats: torch.Tensor, aux_loss: torch.Tensor | None, supervised: int, real_tokens: int
    ) -> None:
        self.sums[:2] += token_stats
        if aux_loss is not None:
            self.sums[2] += aux_loss.detach()
        self.supervised += supervised
        self.micro_batches += 1
        self.real_tokens += real_tokens

    def add(self, other: StepTotals) -> None:
        self.sums += other.sums
        self.supervised += other.supervised
        self.micro_batches += other.micro_batches
        self.real_tokens += other.real_tokens


class Metrics:
    """Of the steps that were taken: since the last log line, and all tokens since the run began."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._reset()
        self.real_tokens = 0  # this rank's, since the run began; padding is not counted

    def _reset(self) -> None:
        self.steps, self.loss = 0, 0.0  # the loss is that of all ranks
        self.totals = StepTotals.zero(self.processes.device)

    def add_step(self, loss: float, totals: StepTotals) -> None:
        self.steps += 1
        self.loss += loss
        self.totals.add(totals)
        self.real_tokens += totals.real_tokens

    def line(self, *, router_loss: bool) -> dict[str, float]:
        """The means since the last line, over all ranks, under the names TRL gives them. A collective."""
        own = self.totals
        counts = torch.tensor([own.supervised, own.micro_batches, self.real_tokens], dtype=torch.float64)
        sums = torch.cat([own.sums.cpu(), counts])
        dist.all_reduce(sums, group=self.processes.control)
        entropy, correct, aux_loss, supervised, micro_batches, real_tokens = sums.tolist()
        logs = {"loss": self.loss / self.steps, **per_token(entropy, correct, supervised)}
        if router_loss:
            logs["aux_loss"] = aux_loss / micro_batches
        self._reset()
        return {**logs, "num_tokens": int(real_tokens)}

    def state(self) -> dict[str, Any]:
        """This rank's part, as JSON. Floats survive it."""
        own = self.totals
        return {
            "steps": self.steps, "loss": self.loss, "real_tokens": self.real_tokens,
            "sums": own.sums.tolist(), "supervised": own.supervised, "micro_batches": own.micro_batches,
        }  # fmt: skip

    def restore(self, parts: list[dict[str, Any]]) -> None:
        """What `state` gave on every rank. On another number of ranks, rank 0 carries everybody's: only sums over all
        ranks are ever looked at."""
        self.steps, self.loss = parts[0]["steps"], parts[0]["loss"]
        if len(parts) == self.processes.world_size:
            mine = [parts[self.processes.rank]]
        else:
            mine = parts if self.processes.is_main else []
        self.totals = StepTotals.zero(self.processes.device)
        for part in mine:
            sums = torch.tensor(part["sums"], dtype=torch.float64, device=self.processes.device)
            self.totals.add(StepTotals(sums, part["supervised"], part["micro_batches"]))
        self.real_tokens = sum(part["real_tokens"] for part in mine)


def per_token(entropy: float, correct: float, supervised: float) -> dict[str, float]:
    """Per supervised token: entropy of its prediction in nats, and how often the likeliest token was the right one."""
    return {"entropy": entropy / supervised, "mean_token_accuracy": correct / supervised}
