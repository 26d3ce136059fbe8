from __future__ import annotations

import math
import random
import subprocess
import sys
from typing import Any

import pytest
from transformers import TrainingArguments

from shardtune.config.schema import TrainSection
from shardtune.data.order import StepOrder
from shardtune.plan.steps import training_math


def section(**settings: Any) -> TrainSection:
    return TrainSection(**{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **settings})


def test_steps_follow_from_the_effective_batch() -> None:
    result = training_math(section(num_train_epochs=2), rows=100, tokens=5000, processes=4)
    assert result.effective_batch == 24
    assert (result.steps_per_epoch, result.steps, result.epochs) == (5, 10, 2.0)
    assert result.tokens_per_step == 1000
    assert result.total_tokens == 10_000


def test_one_row_is_one_step_an_epoch_however_large_the_batch() -> None:
    result = training_math(section(num_train_epochs=3), rows=1, tokens=7, processes=8)
    assert (result.steps_per_epoch, result.steps, result.total_tokens) == (1, 3, 21)


def test_max_steps_wins_over_epochs_and_says_how_many_epochs_that_is() -> None:
    result = training_math(section(num_train_epochs=9, max_steps=5), rows=24, tokens=240, processes=2)
    assert (result.steps, result.epochs) == (5, 2.5)


def test_a_part_of_an_epoch_is_rounded_up_to_whole_steps() -> None:
    result = training_math(section(num_train_epochs=0.5), rows=30, tokens=300, processes=1)
    assert (result.steps_per_epoch, result.steps) == (5, 3)


@pytest.mark.parametrize(
    ("settings", "warmup"),
    [
        ({"warmup_ratio": 0.05}, 5),
        ({"warmup_ratio": 0.07}, 8),
        ({"warmup_ratio": 0.0}, 0),
        ({"warmup_steps": 0}, 0),
        ({"warmup_steps": 7, "warmup_ratio": 0.5}, 7),
        ({"warmup_ratio": 0.001}, 1),
    ],
)
def test_warm_up_is_counted_as_transformers_counts_it(settings: dict, warmup: int, tmp_path: Any) -> None:
    result = training_math(section(max_steps=100, **settings), rows=10, tokens=10, processes=1)
    assert result.warmup_steps == warmup
    given = settings.get("warmup_steps", settings.get("warmup_ratio"))
    assert TrainingArguments(str(tmp_path), warmup_steps=given, use_cpu=True).get_warmup_steps(100) == warmup


def test_a_constant_schedule_has_no_warm_up() -> None:
    result = training_math(section(max_steps=100, lr_scheduler_type="constant"), rows=10, tokens=10, processes=1)
    assert result.warmup_steps == 0


def test_the_steps_are_those_the_trainer_will_make_of_the_data_order() -> None:
    rng = random.Random(1)
    for _ in range(200):
        rows, micro, accumulation, world = rng.randint(1, 90), rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 5)
        epochs = rng.choice([0.3, 1, 1.5, 3])
        order = StepOrder(rows, micro_batch=micro, accumulation=accumulation, world_size=world, rank=0, seed=0)
        of_the_trainer = math.ceil(epochs * math.ceil(len(order) / accumulation))
        ours = training_math(
            section(
                per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation, num_train_epochs=epochs
            ),
            rows=rows,
            tokens=rows,
            processes=world,
        )
        assert ours.steps == of_the_trainer


def test_the_plan_needs_no_torch() -> None:
    code = "import sys; import shardtune.plan.steps, shardtune.plan.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
