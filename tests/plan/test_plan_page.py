from __future__ import annotations

import io
from dataclasses import replace

import pytest
from planning import planned
from rich.console import Console

from shardtune.plan.compare import alternatives, nearest_that_fits
from shardtune.plan.page import bar, rests_on, show, show_alternatives, verdict
from shardtune.plan.report import Plan


def shown(plan: Plan, width: int = 80, *, compare: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show(console, plan, None if plan.fits else nearest_that_fits(plan))
    if compare:
        show_alternatives(console, plan, alternatives(plan))
    return console.file.getvalue()  # type: ignore[attr-defined]


def too_large() -> Plan:
    return planned("1x4090", train={"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1})


def test_the_verdict_comes_first() -> None:
    fits, not_ = planned(), too_large()
    assert fits.fits and not not_.fits
    assert shown(fits).startswith(verdict(fits)) and verdict(fits).startswith("fits: ")
    assert "headroom" in verdict(fits) and "of 139.8 GiB per GPU" in verdict(fits)
    assert shown(not_).startswith("does not fit: ")


def test_where_it_does_not_fit_settings_that_do_are_named() -> None:
    plan = too_large()
    nearest = nearest_that_fits(plan)
    assert nearest is not None and nearest.fits
    text = " ".join(shown(plan).split())
    assert all(f"-o {path}=" in text for path in nearest.changes)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("plan", [planned("8xH200", nodes=2), too_large()], ids=["fits", "too large"])
def test_no_line_is_wider_than_the_terminal(plan: Plan, width: int) -> None:
    lines = shown(plan, width, compare=True).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert all("…" not in line for line in lines), "nothing is cut off"


def test_the_bar_is_the_whole_gpu_and_marks_its_end_where_more_is_needed() -> None:
    fits, not_ = planned(), too_large()
    line = bar(fits, 100, coloured=False).plain
    assert len(line) == 100
    assert line.count(".") == pytest.approx(100 * (1 - fits.memory.total / fits.capacity), abs=2)
    over = bar(not_, 100, coloured=False).plain
    assert len(over) == 100 and "." not in over
    assert over.index("|") == pytest.approx(100 * not_.capacity / not_.memory.total, abs=1)


def test_without_colours_the_bar_is_ascii_and_letters_tell_the_parts_apart() -> None:
    text = bar(planned(), 60, coloured=False).plain
    assert text.isascii()
    assert "█" in bar(planned(), 60, coloured=True).plain


def test_every_part_that_takes_memory_has_a_line() -> None:
    plan = planned("2xH200", parallel={"shard": "full"})
    text = shown(plan)
    for part, number in plan.memory.parts().items():
        assert not number or f" {part} " in text, part


def test_what_the_numbers_rest_on_is_said() -> None:
    assert "measured on H200" in rests_on(planned("1xH200"))
    assert "data sheet" in rests_on(planned("1xL40S"))


def test_the_row_of_the_planned_nodes_is_marked_whatever_their_number() -> None:
    marked = [line.split() for line in shown(planned("8xH100", nodes=3), width=100).splitlines() if line.endswith("<")]
    assert [line[:2] for line in marked] == [["3", "24"]]


def test_where_the_host_has_too_little_memory_the_verdict_says_so() -> None:
    plan = planned("1xH200", parallel={"offload_params": True})
    machine = replace(plan.facts.machine, host_memory=4 << 30)
    small = replace(plan, facts=replace(plan.facts, machine=machine))
    assert plan.fits and not small.fits
    assert verdict(small).startswith("does not fit: needs ") and "host memory per node; there are 4 GiB" in verdict(
        small
    )
