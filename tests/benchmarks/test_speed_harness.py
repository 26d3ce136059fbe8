"""The harness around measurements: what it has is on the disk, what it cannot have says why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import speed
from apart import Ended
from cases import CASES, TINY, Pace
from ours import read_run
from windows import read_windows

ABOUT = {"chip": "a chip", "versions": {"torch": "1"}, "tiny": True, "commit": "abc"}


def lines(file: Path, *values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(value) + "\n" for value in values))


class FakeRun:
    """Stands in for a process: writes what it would have written."""

    def __init__(self, code: int | None = 0, steps: int = 4, said: str = "") -> None:
        self.code, self.steps, self.said = code, steps, said
        self.limits: list[float] = []
        self.commands: list[Sequence[str]] = []
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str]) -> Ended:
        self.limits.append(limit), self.commands.append(command), self.environments.append(environment)
        log.write_text(self.said)
        if "train" in command:
            folder = Path(command[command.index("train") + 1]).parent / "runs" / "bench"
            steps = ({"event": "step", "step": s, "tokens_per_second": 100.0 * s, "loss": 1.0} for s in self._steps())
            lines(folder / "events-rank0.jsonl", {"event": "plan", "adapters": {"trainable": 9}}, *steps)
        else:
            settings = json.loads(Path(command[-1]).read_text())
            told = ({"step": s, "tokens": 50 * s, "seconds": 0.5 * s, "trainable": 9} for s in self._steps())
            lines(Path(settings["out"]), *told)
        return Ended(self.code, 1.5)

    def _steps(self) -> range:
        return range(1, self.steps + 1)


@pytest.fixture
def harness(tmp_path: Path) -> Callable[..., speed.Harness]:
    def make(run: FakeRun, **given: Any) -> speed.Harness:
        return speed.Harness(tmp_path, ABOUT, TINY, tiny=True, run=run, **given)

    return make


def test_a_result_is_in_the_file_as_soon_as_it_is_measured(harness: Callable[..., speed.Harness]) -> None:
    ours = harness(FakeRun())
    ours.measure("dense-4k")
    told = json.loads((ours.out / "speed.json").read_text())
    assert told["measurements"]["dense-4k"]["tokens_per_second"] == 350.0  # steps 3 and 4
    ours.measure("stock-dense")
    told = json.loads((ours.out / "speed.json").read_text())
    assert told["measurements"]["stock-dense"] | {"settings": 0} == {
        "by": "stock", "overrides": [], "tokens_per_second": 100.0, "slowest": 100.0, "fastest": 100.0,
        "steps_counted": 3, "trainable": 9, "wall_seconds": 1.5, "commit": "abc", "settings": 0,
    }  # fmt: skip
    assert list(told["measurements"]) == ["dense-4k", "stock-dense"]


def test_settings_behind_a_case_reach_its_run(harness: Callable[..., speed.Harness]) -> None:
    run = FakeRun()
    ours = harness(run)
    ours.measure("moe8,train.compile=false,lora.r=4")
    assert list(run.commands[0][-4:]) == ["-o", "train.compile=false", "-o", "lora.r=4"]
    assert ours.measure("stock-moe8,rank=4,checkpointing=false")["settings"]["rank"] == 4
    assert "moe8,train.compile=false,lora.r=4" in ours.measurements


def test_nothing_is_begun_when_the_budget_is_spent(harness: Callable[..., speed.Harness]) -> None:
    run = FakeRun()
    result = harness(run, deadline=time.monotonic() + 5).measure("dense-4k")
    assert result["why"] == "budget" and run.limits == []


def test_a_measurement_gets_what_the_budget_leaves(harness: Callable[..., speed.Harness]) -> None:
    run = FakeRun(code=None, steps=0)
    result = harness(run, deadline=time.monotonic() + 40, limit=300).measure("dense-4k")
    assert 30 < run.limits[0] <= 40 and result["why"] == "budget"
    result = harness(run, limit=20).measure("dense-4k")
    assert run.limits[1] == 20 and result["why"] == "took longer than 20 s"


def test_what_was_cut_short_keeps_the_steps_it_has(harness: Callable[..., speed.Harness]) -> None:
    result = harness(FakeRun(code=None, steps=3), limit=20).measure("dense-4k")
    assert result["tokens_per_second"] == 300 and result["steps_counted"] == 1
    assert result["notes"] == ["cut short: took longer than 20 s"] and "why" not in result


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried …\nbye\n", "out of memory"),
        ("Error: Rank 0 ran out of GPU memory in the forward pass of step 1: 2 GB were wanted.\n", "out of memory"),
        ("Traceback\nValueError: no such thing\n\nand words\n", "ValueError: no such thing"),
        ("only words\n", "only words"),
        ("", "exit code 1"),
    ],
)
def test_what_failed_says_why(harness: Callable[..., speed.Harness], said: str, why: str) -> None:
    result = harness(FakeRun(code=1, steps=0, said=said)).measure("stock-dense")
    assert result["why"] == why and "tokens_per_second" not in result


def test_a_library_that_is_not_there_is_said_not_measured(
    harness: Callable[..., speed.Harness], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = FakeRun()
    monkeypatch.setattr(speed, "has_module", lambda name: False)
    assert harness(run).measure("stock-dense-liger")["why"] == "liger-kernel is not installed"
    assert harness(run).measure("unsloth-dense")["why"] == "no --unsloth-site"
    assert "no unsloth in" in harness(run, unsloth_site=tmp_path).measure("unsloth-dense")["why"]
    assert run.commands == []
    (tmp_path / "unsloth").mkdir()
    assert harness(run, unsloth_site=tmp_path).measure("unsloth-dense")["tokens_per_second"] == 100
    assert run.environments[0]["PYTHONPATH"].split(":")[0] == str(tmp_path)
    assert harness(run).measure("stock-dense-packing")["settings"]["liger"] is False


def test_it_says_when_somebody_else_holds_the_memory(
    harness: Callable[..., speed.Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "wait_for_memory", lambda in_use, before: False)
    assert harness(FakeRun()).measure("dense-4k")["notes"] == ["the device's memory was not free"]


def test_going_on_keeps_what_is_still_true(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    measured = {
        "dense-4k": {"by": "ours", "commit": "abc", "tokens_per_second": 1},
        "moe8": {"by": "ours", "commit": "older", "tokens_per_second": 1},
        "stock-dense": {"by": "stock", "commit": "older", "tokens_per_second": 1},
        "stock-moe8": {"by": "stock", "commit": "abc", "why": "budget"},
    }
    assert speed.taken_over(file, ABOUT) == {}
    file.write_text(json.dumps({"about": ABOUT, "measurements": measured}))
    assert set(speed.taken_over(file, ABOUT)) == {"dense-4k", "stock-dense"}
    assert speed.taken_over(file, {**ABOUT, "chip": "another"}) == {}
    assert speed.taken_over(file, {**ABOUT, "versions": {"torch": "2"}}) == {}


def test_a_line_that_counts_from_within_the_warm_up_does_not_count(tmp_path: Path) -> None:
    def step(number: int) -> dict[str, Any]:
        return {"event": "step", "step": number, "tokens_per_second": float(number), "loss": 1.0}

    plan = {"event": "plan", "adapters": {"trainable": 1}}
    profile = {"event": "profile", "memory": {"peak": 3 * 2**30, "reserved": 4 * 2**30, "allocated": 1}, "mfu": 0.5}
    lines(tmp_path / "events-rank0.jsonl", plan, *map(step, (1, 2, 4, 6, 8, 10)), profile)
    found = read_run(tmp_path, warm=6)
    assert (found["tokens_per_second"], found["slowest"], found["fastest"]) == (9, 8, 10)
    assert (found["steps_counted"], found["peak_gib"], found["reserved_gib"], found["mfu"]) == (4, 3, 4, 0.5)
    lines(tmp_path / "events-rank0.jsonl", plan, *map(step, (1, 2, 4, 7, 8)))
    assert read_run(tmp_path, warm=6) == {}


def test_the_last_line_of_a_process_that_was_ended_may_be_cut(tmp_path: Path) -> None:
    file = tmp_path / "windows.jsonl"
    lines(file, *({"step": s, "tokens": 10 * s, "seconds": float(s)} for s in (2, 4, 6)))
    with file.open("a") as out:
        out.write('{"step": 8, "tok')
    assert read_windows(file, warm=4)["steps_counted"] == 2
    assert read_windows(tmp_path / "absent", warm=4) == {}


def test_steps_that_count_are_at_least_ten_after_warm_up() -> None:
    pace = Pace()
    assert pace.window * pace.windows >= 10
    for some in (pace, speed.QUICK, speed.TINY):
        assert some.warm % some.window == 0 and some.steps == some.warm + some.window * some.windows


def test_every_case_can_be_laid_out_as_a_toy(tmp_path: Path, harness: Callable[..., speed.Harness]) -> None:
    run = FakeRun()
    every = harness(run, unsloth_site=tmp_path)
    (tmp_path / "unsloth").mkdir()
    found = {name: every.measure(name) for name in CASES if name != "stock-dense-liger"}
    assert {name: one.get("why") for name, one in found.items() if "why" in one} == {}
