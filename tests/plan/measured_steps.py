"""Training steps that were measured on one H200, and what was trained: what the constants of `plan` are fitted to.

python tests/plan/measured_steps.py      prints the table of docs/plan.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from model_facts import dense_7b, mistral4

from shardtune.plan.catalogue import load_catalogue
from shardtune.plan.facts import Facts
from shardtune.plan.step_time import StepTime, step_time
from shardtune.plan.work import Work

BEGIN, END = "<!-- begin: measured steps -->", "<!-- end: measured steps -->"


@dataclass(frozen=True)
class Measured:
    """tokens_per_second: Real ones. fitted: Used to fit the constants; the others only test them."""

    name: str
    facts: Facts
    work: Work
    tokens_per_second: float
    fitted: bool = True

    def predicted(self) -> StepTime:
        catalogue = load_catalogue()
        return step_time(self.facts, self.work, catalogue.cluster(catalogue.gpu("H200"), (1,)))

    @property
    def error(self) -> float:
        """Of the step's time: 0.1 = predicted 10 % longer than measured."""
        return self.tokens_per_second / self.predicted().tokens_per_second - 1


def _work(batch: int = 4, length: int = 4096, checkpointing: str = "none", **others: object) -> Work:
    return Work(batch, length, checkpointing=checkpointing, compiled=True, **others)  # type: ignore[arg-type]


_FP8 = {"fp8": True, "fp8_compute": True}
_PACKED = {"packed": True, "document": 250, "fill": 0.99}

# The first table of the README's speed section, and docs/activations.md; commit 4c25362.
MEASURED = [
    Measured("dense 7B, 4 × 4096", dense_7b(), _work(), 16521),
    Measured("dense 7B, 4 × 4096, again", dense_7b(), _work(), 16672, fitted=False),
    Measured("dense 7B, 2 × 4096", dense_7b(), _work(2), 16495, fitted=False),
    Measured("dense 7B, short rows packed into 4 × 4096", dense_7b(), _work(**_PACKED), 17667),
    Measured("dense 7B, 4 × 4096, FP8 products", dense_7b(), _work(**_FP8), 23410),
    Measured("dense 7B, 4 × 4096, full", dense_7b(), _work(checkpointing="full"), 11640),
    Measured("dense 7B, 4 × 4096, full, activations offloaded", dense_7b(),
             _work(checkpointing="full", offload_activations=True), 11616, fitted=False),
    Measured("dense 7B, 1 × 65536, full, activations offloaded", dense_7b(),
             _work(1, 65536, "full", offload_activations=True), 4597),
    Measured("dense 7B, 1 × 131072, full, activations offloaded", dense_7b(),
             _work(1, 131072, "full", offload_activations=True), 2758, fitted=False),
    Measured("Mistral 4, 8 layers, 4 × 4096", mistral4(8), _work(), 58818),
    Measured("Mistral 4, 8 layers, 4 × 4096, experts adapted", mistral4(8, expert_rank=16), _work(), 51706),
    Measured("Mistral 4, 8 layers, 4 × 4096, experts adapted, full", mistral4(8, expert_rank=16),
             _work(checkpointing="full"), 38629, fitted=False),
    Measured("Mistral 4, 36 layers, 4 × 4096, FP8 products, full", mistral4(36, quantised=True),
             _work(checkpointing="full", **_FP8), 12868),
    Measured("Mistral 4, 36 layers, 4 × 4096, FP8 products, experts adapted (4), full",
             mistral4(36, quantised=True, expert_rank=4), _work(checkpointing="full", **_FP8), 11266, fitted=False),
]  # fmt: skip


def table() -> str:
    lines = ["| | measured tok/s | predicted | error of the time | |", "|---|---:|---:|---:|---|"]
    for case in MEASURED:
        rates = f"{case.tokens_per_second:,.0f} | {case.predicted().tokens_per_second:,.0f} | {case.error:+.1%}"
        lines.append(f"| {case.name} | {rates} | {'fitted' if case.fitted else ''} |")
    return "\n".join(lines)


def write_into(page: Path) -> None:
    """Replace what is between the markers."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    write_into(Path(sys.argv[1]))
