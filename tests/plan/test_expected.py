from __future__ import annotations

from dataclasses import replace

import pytest
from model_facts import dense_7b
from planning import ROWS, asked, planned

from shardtune.observe.schema import EVENTS, _problems_of
from shardtune.plan.expected import expected_of
from shardtune.plan.facts import Machine

GPU = Machine("cuda", 139 << 30, 1, (1,), gpu="NVIDIA H200")


def test_a_run_expects_what_the_plan_says() -> None:
    plan = planned("1xH200")
    expected = expected_of(replace(plan.facts, machine=GPU), plan.config, ROWS)
    assert expected.time is not None and expected.measured and not expected.coarse
    assert expected.memory.allocated == plan.memory.allocated
    assert expected.time.seconds == pytest.approx(plan.time.seconds)
    assert not _problems_of(expected.event(), EVENTS["plan"].fields["expected"].fields, "expected.")


def test_planned_and_actual_stand_side_by_side_with_the_difference() -> None:
    plan = planned("1xH200")
    expected = expected_of(replace(plan.facts, machine=GPU), plan.config, ROWS)
    assert expected.time is not None
    text = expected.beside(int(0.99 * expected.memory.allocated), 1.1 * expected.time.seconds)
    assert "(-1.0 %)" in text and "(+10.0 %)" in text and "coarse" not in text
    assert expected.beside(None, None) == ""


def test_a_gpu_that_nobody_knows_has_no_expected_time_and_a_cpu_a_coarse_one() -> None:
    plan = planned("1xH200")
    other = expected_of(replace(plan.facts, machine=replace(GPU, gpu="Some GPU")), plan.config, ROWS)
    assert other.time is None and "step_seconds" not in other.event()
    cpu = Machine("cpu", 16 << 30, 1, (1,))
    config = asked(parallel={"shard": "replicate"}, train={"offload_activations": False}).config
    coarse = expected_of(replace(dense_7b(device="cpu"), machine=cpu), config, ROWS)
    assert coarse.coarse and coarse.beside(None, 1.0) == ""
