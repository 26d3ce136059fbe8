from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from transformers import TrainerState

from shardtune.observe.events import EventLog
from shardtune.observe.progress import ProgressLines
from shardtune.terminal import clock


class Run:
    """A training of ten steps told step by step, with a clock we turn."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **console: Any) -> None:
        self.now, self.paused = 1000.0, 0.0
        monkeypatch.setattr("shardtune.observe.progress.time", SimpleNamespace(perf_counter=lambda: self.now))
        self.output = io.StringIO()
        self.log = EventLog(folder, 0)
        self.lines = ProgressLines(Console(file=self.output, **{"width": 200, **console}), self.log)
        self.state = TrainerState(max_steps=10)
        self.lines.begin(self.state, tokens=0, paused=self.paused)

    def step(self, seconds: float = 2.0, **logs: Any) -> None:
        self.now += seconds
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / 5
        self.lines.end_step(self.state)
        if logs:
            self.tell(**logs)

    def tell(self, **logs: Any) -> None:
        if "eval_loss" in logs:
            known = {"eval_tokens": 10, "eval_entropy": 1.0, "eval_mean_token_accuracy": 0.5}
            self.lines.eval_line(self.state, {**known, **logs})
        else:
            known = {"num_tokens": 0, "learning_rate": 0.0, "entropy": 1.0, "mean_token_accuracy": 0.5}
            self.lines.train_line(self.state, {**known, **logs}, self.paused)

    @property
    def said(self) -> list[str]:
        return self.output.getvalue().splitlines()

    @property
    def events(self) -> list[dict]:
        return [json.loads(line, parse_constant=pytest.fail) for line in self.log.path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_plain_line_tells_step_loss_gradient_rate_speed_and_time_left(run: Run) -> None:
    run.step(loss=2.34567, grad_norm=0.5, learning_rate=1e-4, num_tokens=3000.0)
    assert run.said == [
        "step 1/10  loss 2.3457  acc 50.0 %  entropy 1.000  grad 0.500  lr 1.00e-04  1,500 tok/s  0:18 left"
    ]


def test_a_line_without_a_gradient_or_tokens_does_not_fail(run: Run) -> None:
    run.step(loss=2.0)
    assert run.said == ["step 1/10  loss 2.0000  acc 50.0 %  entropy 1.000  lr 0.00e+00  0 tok/s  0:18 left"]


def test_speed_counts_what_came_since_the_last_line_and_leaves_out_evaluating_and_saving(run: Run) -> None:
    run.step(loss=2.0, num_tokens=1000)
    run.now, run.paused = run.now + 50, 50.0
    run.step(loss=2.0, num_tokens=5000)
    assert "  2,000 tok/s  " in run.said[1]  # 4000 tokens in the 2 seconds that were training
    assert run.said[1].endswith("3:36 left")  # 54 s for 2 steps so far, pauses and all
    assert run.events[1]["tokens_per_second"] == 2000.0


def test_steps_between_two_lines_are_counted_together(run: Run) -> None:
    for _ in range(4):
        run.step()
    run.step(loss=1.0, num_tokens=10_000)
    assert run.said == ["step 5/10  loss 1.0000  acc 50.0 %  entropy 1.000  lr 0.00e+00  1,000 tok/s  0:10 left"]


def test_each_line_is_an_event_with_the_same_numbers(run: Run) -> None:
    run.step(loss=2.34567, grad_norm=0.5, learning_rate=1e-4, num_tokens=3000.0)
    [event] = run.events
    del event["time"]
    assert event == {
        "v": 2, "rank": 0, "event": "step", "step": 1, "epoch": 0.2, "loss": 2.34567, "grad_norm": 0.5,
        "learning_rate": 1e-4, "tokens": 3000, "entropy": 1.0, "token_accuracy": 0.5, "tokens_per_second": 1500.0,
    }  # fmt: skip


def test_an_evaluation_is_told_and_recorded(run: Run) -> None:
    run.step()
    run.tell(eval_loss=1.25, eval_tokens=77)
    assert run.said == ["step 1/10  eval loss 1.2500  token accuracy 50.0 %  entropy 1.000"]
    assert [(e["event"], e["step"], e["loss"], e["tokens"]) for e in run.events] == [("eval", 1, 1.25, 77)]


def test_a_diverged_loss_is_shown_and_recorded_as_json(run: Run) -> None:
    run.step(loss=math.nan, grad_norm=math.inf, learning_rate=1e-4, num_tokens=10)
    run.tell(eval_loss=math.nan)
    assert "loss NaN  acc 50.0 %  entropy 1.000  grad inf" in run.said[0]
    assert "eval loss NaN" in run.said[1]
    assert [event["loss"] for event in run.events] == ["nan", "nan"]


def test_a_quiet_rank_says_nothing_and_records_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, quiet=True, force_terminal=True)
    run.step(loss=2.0, num_tokens=10)
    run.tell(eval_loss=1.0)
    run.lines.close()
    assert run.output.getvalue() == ""
    assert [event["event"] for event in run.events] == ["step", "eval"]


def test_on_a_terminal_the_lines_stay_and_a_bar_below_them_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, force_terminal=True, width=80)
    run.step(loss=2.0, num_tokens=3000)
    run.tell(eval_loss=1.25)
    run.lines.close()
    shown = run.output.getvalue()
    assert "step 1/10  loss 2.0000  lr 0.00e+00  1,500 tok/s  0:18 left\n" in shown
    assert "step 1/10  eval loss 1.2500\n" in shown
    assert "training" in shown and shown.rstrip().endswith("\x1b[2K")  # the bar was there and is wiped away
    length = len(shown)
    run.lines.close()  # again, as `finally` does
    assert len(run.output.getvalue()) == length
    assert [event["event"] for event in run.events] == ["step", "eval"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.9, "0:00"), (12, "0:12"), (60, "1:00"), (3599.9, "59:59"), (3700, "1:01:40"), (360_000, "100:00:00")],
)  # fmt: skip
def test_a_duration_reads_as_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_bar_leaves_room_for_what_a_terminal_echoes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`^C` behind a full line goes onto the next one, which is then erased in place of the bar."""
    run = Run(tmp_path, monkeypatch, force_terminal=True)
    run.step(loss=1.0, num_tokens=1.0)
    run.lines.close()
    drawn = [Text.from_ansi(line).plain for line in re.split(r"[\r\n]", run.output.getvalue())]
    bars = [line for line in drawn if line.startswith("training")]
    assert bars and max(map(len, bars)) <= 200 - len("^C")
