"""How many steps is that? The training math, from numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardtune.config.schema import TrainSection
from shardtune.terminal import count


@dataclass(frozen=True)
class TrainingMath:
    """Effective batch = per-device × processes × accumulation; steps follow from it."""

    per_device: int
    processes: int
    accumulation: int
    rows: int
    tokens: int
    epochs: float
    steps_per_epoch: int
    steps: int
    warmup_steps: int

    @property
    def effective_batch(self) -> int:
        return self.per_device * self.processes * self.accumulation

    @property
    def tokens_per_step(self) -> float:
        """Average over an epoch; padding is not counted."""
        return self.tokens / self.steps_per_epoch

    @property
    def total_tokens(self) -> int:
        return round(self.tokens_per_step * self.steps)


def training_math(section: TrainSection, *, rows: int, tokens: int, processes: int) -> TrainingMath:
    """The math of a run.

    Args:
        rows: Training rows after dropping what cannot be trained on.
        tokens: Tokens in them, without padding.
    """
    batch = section.micro_batch * processes * section.accumulation
    per_epoch = math.ceil(rows / batch)
    steps = section.max_steps if section.max_steps > 0 else math.ceil(per_epoch * section.num_train_epochs)
    # As transformers counts: a ratio is rounded up to whole steps, and `constant` has no warm-up.
    warmup = section.warmup_steps if section.warmup_steps is not None else math.ceil(steps * section.warmup_ratio)
    warmup = 0 if section.lr_scheduler_type == "constant" else warmup
    return TrainingMath(
        per_device=section.micro_batch,
        processes=processes,
        accumulation=section.accumulation,
        rows=rows,
        tokens=tokens,
        epochs=steps / per_epoch,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup,
    )


def math_lines(math: TrainingMath, unit: str = "rows") -> tuple[str, str]:
    """The batch and the steps, each with how it was counted."""
    batch = (
        f"{math.per_device} per device × {count(math.processes, 'process', 'es')} × {math.accumulation} accumulation "
        f"= {math.effective_batch} {unit} per step"
    )
    if math.effective_batch > math.rows:
        batch += f", more than there are ({math.rows:,}): steps are not full"
    steps = (
        f"{math.steps:,} ({_epochs(math.epochs)} of {math.rows:,} {unit} / {math.effective_batch}), "
        f"{math.warmup_steps} for warm-up, about {math.total_tokens:,} tokens"
    )
    return batch, steps


def _epochs(number: float) -> str:
    return f"{number:.3g} epoch{'' if f'{number:.3g}' == '1' else 's'}"
