"""Learning rates are those of transformers at every step, and arguments that a schedule cannot use are refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from shardtune.config.schedules import REFUSED_SCHEDULES, SCHEDULES, check_schedule_kwargs
from shardtune.config.schema import TrainSection
from shardtune.errors import UserInputError
from shardtune.plan.schedule import schedule_factor

PEAK = 3e-4
CASES: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.5, "lr_end": 1e-5}),
    ("polynomial", {"power": 0.5, "lr_end": 0.0}),
    ("cosine_with_min_lr", {"min_lr": 2e-5}),
    ("cosine_with_min_lr", {"min_lr": 0}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.75}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 4}),
    ("warmup_stable_decay", {"num_decay_steps": 1}),
    ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "1-sqrt", "warmup_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "linear", "warmup_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 7, "num_cycles": 1.25, "min_lr_ratio": 0.2}),
]


def section(kind: str, kwargs: dict[str, Any]) -> TrainSection:
    return TrainSection(learning_rate=PEAK, lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize(("kind", "kwargs"), CASES)
def test_every_step_has_the_learning_rate_of_transformers(kind: str, kwargs: dict[str, Any], warmup: int) -> None:
    steps = 17
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    stock = get_scheduler(kind, optimizer, warmup, steps, dict(kwargs))
    factor = schedule_factor(section(kind, kwargs), steps, warmup)
    for step in range(steps + 3):  # a scheduler is asked once more after the last step
        assert PEAK * factor(step) == stock.get_last_lr()[0], step
        optimizer.step()
        stock.step()


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind != "warmup_stable_decay"])
def test_a_run_that_is_all_warm_up_has_a_learning_rate_at_every_step(kind: str) -> None:
    kwargs = {"min_lr_rate": 0.1} if kind == "cosine_with_min_lr" else {}
    factor = schedule_factor(section(kind, kwargs), 4, 4)
    assert [factor(step) for step in range(4)] == ([1.0] * 4 if kind == "constant" else [0.0, 0.25, 0.5, 0.75])
    assert 0 <= factor(4) <= 1


def test_every_schedule_of_transformers_is_there_or_refused() -> None:
    assert set(SCHEDULES) == set(get_args(TrainSection.model_fields["lr_scheduler_type"].annotation))
    assert {kind.value for kind in SchedulerType} == set(SCHEDULES) | set(REFUSED_SCHEDULES)


@pytest.mark.parametrize(
    ("kind", "kwargs", "problem"),
    [
        ("cosine", {"num_cycle": 1}, ("num_cycle", "cosine has no argument 'num_cycle'", "did you mean `num_cycles`?")),
        ("linear", {"power": 2}, ("power", "linear has no argument 'power'", "remove it")),
        ("cosine", {"num_cycles": 0}, ("num_cycles", "expected a number, above 0; got 0", "")),
        ("cosine_with_restarts", {"num_cycles": 1.5}, ("num_cycles", "expected a whole number, at least 1; got 1.5", "")),
        ("cosine", {"num_cycles": True}, ("num_cycles", "expected a number, above 0; got true", "")),
        ("polynomial", {"lr_end": PEAK}, ("lr_end", "lr_end (0.0003) is not below the learning rate (0.0003)", None)),
        ("polynomial", {"power": "two"}, ("power", "expected a number, above 0; got 'two'", "")),
        ("cosine_with_min_lr", {}, ("min_lr", "cosine_with_min_lr needs min_lr or min_lr_rate", None)),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, ("min_lr", "cosine_with_min_lr needs one of min_lr and min_lr_rate, not both", None)),
        ("cosine_with_min_lr", {"min_lr": 1}, ("min_lr", "min_lr (1) is above the learning rate (0.0003)", None)),
        ("inverse_sqrt", {"timescale": 0}, ("timescale", None, "")),
        ("warmup_stable_decay", {}, ("num_decay_steps", None, "add `num_decay_steps`, a whole number, at least 1")),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "sqrt"}, ("decay_type", "expected one of: linear, cosine, 1-sqrt; got 'sqrt'", "")),
        ("warmup_stable_decay", {"num_decay_steps": 3, "num_stable_steps": 9}, ("num_stable_steps", None, "remove it")),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "linear", "num_cycles": 2}, ("num_cycles", "num_cycles has no effect with decay_type: linear", "remove it")),
        ("warmup_stable_decay", {"num_decay_steps": 18}, ("num_decay_steps", "18 decay steps after 3 warm-up steps do not fit in 20 steps", "set num_decay_steps to 17 or fewer, or train for more steps")),
    ],
)  # fmt: skip
def test_an_argument_that_the_schedule_cannot_use_is_refused(
    kind: str, kwargs: dict[str, Any], problem: tuple[str, str | None, str | None]
) -> None:
    (found,) = check_schedule_kwargs(kind, kwargs, learning_rate=PEAK, steps=20, warmup_steps=3)
    for part, wanted in zip(found, problem, strict=True):
        assert wanted is None or part == wanted
    with pytest.raises(UserInputError, match=f"lr_scheduler_kwargs.{problem[0]}"):
        schedule_factor(section(kind, kwargs), 20, 3)
