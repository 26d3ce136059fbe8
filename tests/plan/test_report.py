from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planning import ROWS, planned

from shardtune.plan.report import as_json, choices


def test_training_math_counts_packed_sequences_and_every_process() -> None:
    plan = planned("2xH200", nodes=2)
    assert plan.math is not None
    assert plan.math.effective_batch == 2 * 4 * 4
    assert plan.math.rows == ROWS.sequences and plan.math.steps_per_epoch == -(-1_500 // 32)
    assert plan.work.fill == pytest.approx(6_000_000 / (1_500 * 4096))
    assert plan.work.document == pytest.approx(300)


def test_without_data_the_steps_are_those_that_the_config_names_or_unknown() -> None:
    assert planned(rows=None).total is None
    plan = planned(rows=None, train={"max_steps": 50})
    assert plan.total is not None and plan.total.training == pytest.approx(50 * plan.time.seconds)


def test_evaluations_and_saves_are_part_of_the_total() -> None:
    validated = replace(ROWS, validation=500)
    settings = {"data": {"val_split": 0.05}, "train": {"eval_steps": 10, "save_steps": 10}}
    with_both = planned(rows=validated, **settings).total
    assert with_both is not None and with_both.evaluating > 0 and with_both.saving > 0
    without = planned(train={"save_strategy": "no"}).total
    assert without is not None and without.evaluating == without.saving == 0


def test_every_choice_of_auto_has_a_reason() -> None:
    found = {path: (value, why) for path, value, why in choices(planned("8xH200", nodes=2).run)}
    assert found["parallel.shard"][0] in ("replicate", "hybrid", "full")
    assert found["train.compile"][0] is True
    assert all(why for _, why in found.values())


def test_json_holds_plain_numbers_that_add_up() -> None:
    plan = planned("2xH100", nodes=2)
    found = json.loads(json.dumps(as_json(plan)))
    memory = found["memory"]
    assert memory["capacity"] == plan.capacity and memory["usable"] < memory["capacity"]
    assert memory["allocated"] <= memory["total"]
    assert found["fits"] is (memory["total"] <= memory["usable"])
    assert found["time"]["tokens_per_second"] == pytest.approx(found["time"]["tokens"] / found["time"]["seconds"])
    assert [point["nodes"] for point in found["scaling"]] == [1, 2, 4, 8, 16, 32, 64]
    assert found["training"]["effective_batch"] == 32


def test_a_scaling_curve_has_the_nodes_that_are_planned_too() -> None:
    plan = planned("2xH100", nodes=3)
    assert [point.nodes for point in plan.scaling] == [1, 2, 3, 4, 8, 16, 32, 64]
    (own,) = [point for point in plan.scaling if point.nodes == 3]
    assert own.step.tokens_per_second == pytest.approx(plan.time.tokens_per_second)
    assert [point.nodes for point in planned("2xH100", nodes=128).scaling][-2:] == [64, 128]


def test_a_scaling_curve_resolves_the_run_on_each_number_of_nodes() -> None:
    one, many = planned("8xH200").scaling, planned("8xH200", nodes=8).scaling
    assert [p.step.tokens_per_second for p in one] == pytest.approx([p.step.tokens_per_second for p in many])
    some = planned(
        "8xH200",
        train={"effective_batch_size": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": "auto"},
    )
    assert [point.nodes for point in some.scaling] == [1, 2, 4, 8], "more processes cannot divide 64 rows"
