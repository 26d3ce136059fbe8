"""What is the learning rate at each step? The formulas of transformers' `get_scheduler`, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardtune.config.fields import Section
from shardtune.config.schedules import (
    SCHEDULES,
    Cosine,
    CosineWithMinLr,
    CosineWithRestarts,
    InverseSqrt,
    Polynomial,
    WarmupStableDecay,
    check_schedule_kwargs,
)
from shardtune.config.schema import TrainSection
from shardtune.errors import UserInputError

Factor = Callable[[int], float]  # optimizer steps taken so far -> multiple of the peak learning rate


def schedule_factor(train: TrainSection, steps: int, warmup_steps: int) -> Factor:
    """The multiple of `train.learning_rate` for each optimizer step, by the number of steps taken before it.

    Raises:
        UserInputError: `train.lr_scheduler_kwargs` do not fit the schedule or the number of steps.
    """
    kind = train.lr_scheduler_type
    problems = check_schedule_kwargs(
        kind, train.lr_scheduler_kwargs, learning_rate=train.learning_rate, steps=steps, warmup_steps=warmup_steps
    )
    if problems:
        key, what, fix = problems[0]
        raise UserInputError(
            f"train.lr_scheduler_kwargs.{key}: {what}.", fix=f"{fix[0].upper()}{fix[1:]}." if fix else ""
        )
    arguments = SCHEDULES[kind].model_validate(train.lr_scheduler_kwargs)
    if isinstance(arguments, WarmupStableDecay):
        return _warmup_stable_decay(arguments, steps, warmup_steps)
    after = _after_warmup(kind, arguments, train.learning_rate, steps, warmup_steps)
    if kind == "constant":
        return after
    return lambda step: step / max(1, warmup_steps) if step < warmup_steps else after(step)


def _after_warmup(kind: str, arguments: Section, learning_rate: float, steps: int, warmup_steps: int) -> Factor:
    length = max(1, steps - warmup_steps)

    def progress(step: int) -> float:
        return (step - warmup_steps) / length

    match arguments:
        case Cosine():
            lowest = _lowest(arguments, learning_rate)
            return lambda step: max(0.0, _cosine(progress(step), arguments.num_cycles) * (1 - lowest) + lowest)
        case CosineWithRestarts():
            return lambda step: 0.0 if progress(step) >= 1 else _cosine(arguments.num_cycles * progress(step) % 1.0)
        case Polynomial():
            return _polynomial(arguments, learning_rate, progress)
        case InverseSqrt():
            timescale = arguments.timescale or warmup_steps or 10_000
            return lambda step: 1.0 / math.sqrt((step - warmup_steps + timescale) / timescale)
    if kind == "linear":
        return lambda step: max(0.0, (steps - step) / length)
    return lambda step: 1.0


def _cosine(progress: float, cycles: float = 0.5) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))


def _lowest(arguments: Cosine, learning_rate: float) -> float:
    if not isinstance(arguments, CosineWithMinLr):
        return 0.0
    return arguments.min_lr_rate if arguments.min_lr_rate is not None else (arguments.min_lr or 0.0) / learning_rate


def _polynomial(arguments: Polynomial, learning_rate: float, progress: Callable[[int], float]) -> Factor:
    def factor(step: int) -> float:
        remaining = 1 - min(1.0, progress(step))
        decayed: float = (learning_rate - arguments.lr_end) * remaining**arguments.power + arguments.lr_end
        return decayed / learning_rate

    return factor


def _warmup_stable_decay(arguments: WarmupStableDecay, steps: int, warmup_steps: int) -> Factor:
    lowest, decay_steps = arguments.min_lr_ratio, arguments.num_decay_steps
    rise: Callable[[float], float] = {
        "linear": lambda progress: progress,
        "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
        "1-sqrt": lambda progress: 1.0 - math.sqrt(1.0 - progress),
    }[arguments.warmup_type]
    fall: Callable[[float], float] = {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: _cosine(progress, arguments.num_cycles),
        "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }[arguments.decay_type]

    def factor(step: int) -> float:
        decayed = step - (steps - decay_steps)
        if step < warmup_steps:
            share = rise(step / warmup_steps)
        elif decayed < 0:
            return 1.0
        elif decayed < decay_steps:
            share = fall(decayed / decay_steps)
        else:
            return lowest
        return max(0.0, share * (1.0 - lowest) + lowest)

    return factor
