from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning import planned

from shardtune.config import load_config
from shardtune.config.render import render_yaml
from shardtune.plan.compare import alternatives, nearest_that_fits
from shardtune.plan.resolve import resolve


@pytest.mark.parametrize("gpus", ["1xH200", "2xL40S"])
def test_alternatives_come_fastest_that_fits_first_and_those_that_do_not_last(gpus: str) -> None:
    found = alternatives(planned(gpus))
    fitting = [one.fits for one in found]
    assert fitting == sorted(fitting, reverse=True)
    speeds = [one.time.tokens_per_second for one in found if one.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert sum(not one.changes for one in found) == 1, "the plan itself is among them, once"
    assert len({frozenset(one.changes.items()) for one in found}) == len(found)
    assert {one.work.batch * one.work.accumulation for one in found} == {8}, "the effective batch stays"
    assert {one.work.checkpointing for one in found} == {"none", "selective", "full"}
    assert {one.work.fp8 for one in found} == {True, False}


def test_train_accepts_every_alternative(tmp_path: Path) -> None:
    """As a person would: in a file with all settings, and the changes as overrides."""
    plan = planned("2xH200", nodes=2, train={"offload_activations": True, "gradient_checkpointing": "full"})
    file = tmp_path / "run.yaml"
    file.write_text(render_yaml(plan.run.settings, origins=False), encoding="utf-8")
    found = alternatives(plan)
    assert len(found) > 8
    for one in found:
        options = [f"{path}={'null' if value is None else value}" for path, value in one.changes.items()]
        run = resolve(load_config(file, options), plan.facts)
        assert run.config.train.per_device_train_batch_size == one.work.batch, options


def test_the_nearest_settings_that_fit_keep_the_effective_batch_or_there_are_none() -> None:
    plan = planned("1xL40S", train={"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1})
    assert not plan.fits
    nearest = nearest_that_fits(plan)
    assert nearest is not None and nearest.fits
    assert nearest.work.batch * nearest.work.accumulation == 32
    huge = planned("1x4090", data={"max_length": 2**22}, train={"per_device_train_batch_size": 1})
    assert nearest_that_fits(huge) is None


def test_where_the_host_is_small_nothing_is_offloaded_to_it() -> None:
    plan = planned("1xL40S", train={"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1})
    machine = replace(plan.facts.machine, host_memory=6 << 30)
    small = replace(plan, facts=replace(plan.facts, machine=machine))
    nearest = nearest_that_fits(small)
    assert nearest is not None and not nearest.work.offload_params
    offloaded = [one for one in alternatives(small) if one.work.offload_params]
    assert offloaded and not any(one.fits for one in offloaded)
