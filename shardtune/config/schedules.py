"""Which learning-rate schedules are there, and which arguments does each take? Names and defaults are transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from shardtune.config.fields import Float, Int, Section
from shardtune.config.keyword_args import KeywordProblem, check_keywords

Shape = Literal["linear", "cosine", "1-sqrt"]


class NoArguments(Section):
    """constant, constant_with_warmup, linear."""


class Cosine(Section):
    num_cycles: Float = Field(default=0.5, gt=0, description="Waves of the cosine; 0.5 = one fall to zero.")


class CosineWithRestarts(Section):
    num_cycles: Int = Field(default=1, ge=1, description="Falls to zero, each from the peak.")


class CosineWithMinLr(Cosine):
    min_lr: Float | None = Field(default=None, ge=0, description="Lowest learning rate.")
    min_lr_rate: Float | None = Field(default=None, ge=0, le=1, description="The same as a share of the peak.")


class Polynomial(Section):
    lr_end: Float = Field(default=1e-7, ge=0, description="Learning rate after the last step.")
    power: Float = Field(default=1.0, gt=0, description="Exponent of the decay; 1 = linear.")


class InverseSqrt(Section):
    timescale: Int | None = Field(
        default=None,
        ge=1,
        description="Steps after which the decay sets in; null = the warm-up, or 10,000 without one.",
    )


class WarmupStableDecay(Section):
    num_decay_steps: Int = Field(ge=1, description="steps at the end in which the learning rate falls.")
    warmup_type: Shape = Field(default="linear", description="How it rises.")
    decay_type: Shape = Field(default="cosine", description="How it falls.")
    min_lr_ratio: Float = Field(default=0.0, ge=0, le=1, description="Start and end, as a share of the peak.")
    num_cycles: Float = Field(default=0.5, gt=0, description="Waves of the cosine (decay_type: cosine).")


SCHEDULES: dict[str, type[Section]] = {
    "constant": NoArguments,
    "constant_with_warmup": NoArguments,
    "linear": NoArguments,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "cosine_with_min_lr": CosineWithMinLr,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "warmup_stable_decay": WarmupStableDecay,
}

REFUSED_SCHEDULES = {  # name in transformers: (why, what to use)
    "reduce_lr_on_plateau": (
        "it follows the validation loss, so that a learning rate is not known before it is used",
        "use cosine or warmup_stable_decay, with early_stopping_patience to end a run that no longer improves",
    ),
    "greedy": (
        "it follows the loss of each step, so that a learning rate is not known before it is used",
        "use cosine",
    ),
    "cosine_warmup_with_min_lr": (
        "it is cosine_with_min_lr with another first step of the warm-up",
        "use cosine_with_min_lr",
    ),
}


def check_schedule_kwargs(
    kind: str,
    kwargs: Mapping[str, Any],
    *,
    learning_rate: float,
    steps: int | None = None,
    warmup_steps: int = 0,
) -> list[KeywordProblem]:
    """What is wrong with `lr_scheduler_kwargs` of the schedule `kind`: (key, what, fix) each.

    Args:
        steps: Of the whole run, where they are known: some arguments must fit into them.
    """
    problems = check_keywords(SCHEDULES[kind], kwargs, kind)
    if kind == "warmup_stable_decay" and "num_stable_steps" in kwargs:
        what = "num_stable_steps follows from the others: all steps - warm-up - num_decay_steps"
        problems = [one for one in problems if one[0] != "num_stable_steps"]
        problems.append(("num_stable_steps", what, "remove it"))
    if problems:
        return problems
    arguments = SCHEDULES[kind].model_validate(dict(kwargs))
    if isinstance(arguments, CosineWithMinLr):
        return _check_minimum(arguments, learning_rate)
    if isinstance(arguments, Polynomial) and arguments.lr_end >= learning_rate:
        what = f"lr_end ({arguments.lr_end:g}) is not below the learning rate ({learning_rate:g})"
        return [("lr_end", what, "lower lr_end or raise train.learning_rate")]
    if isinstance(arguments, WarmupStableDecay):
        return _check_decay(arguments, kwargs, steps, warmup_steps)
    return []


def _check_minimum(arguments: CosineWithMinLr, learning_rate: float) -> list[KeywordProblem]:
    if (arguments.min_lr is None) == (arguments.min_lr_rate is None):
        how = "one of min_lr and min_lr_rate, not both" if arguments.min_lr is not None else "min_lr or min_lr_rate"
        return [("min_lr", f"cosine_with_min_lr needs {how}", "set min_lr_rate, e.g. 0.1 for a tenth of the peak")]
    if arguments.min_lr is not None and arguments.min_lr > learning_rate:
        what = f"min_lr ({arguments.min_lr:g}) is above the learning rate ({learning_rate:g})"
        return [("min_lr", what, "lower min_lr, or set min_lr_rate: a share of the learning rate")]
    return []


def _check_decay(
    arguments: WarmupStableDecay, kwargs: Mapping[str, Any], steps: int | None, warmup_steps: int
) -> list[KeywordProblem]:
    if "num_cycles" in kwargs and arguments.decay_type != "cosine":
        what = f"num_cycles has no effect with decay_type: {arguments.decay_type}"
        return [("num_cycles", what, "remove it")]
    if steps is not None and arguments.num_decay_steps + warmup_steps > steps:
        what = f"{arguments.num_decay_steps} decay steps after {warmup_steps} warm-up steps do not fit in {steps} steps"
        fix = f"set num_decay_steps to {max(1, steps - warmup_steps)} or fewer, or train for more steps"
        return [("num_decay_steps", what, fix)]
    return []
