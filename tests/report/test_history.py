"""What the events of a run add up to, with restarts, rollbacks and ranks."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_run import FakeRun, script_run, showcase

from shardtune.report.api import RunsApi
from shardtune.report.compare import compare_view
from shardtune.report.history import RunHistory
from shardtune.report.page import embedded
from shardtune.report.view import run_view


def read(folder: Path) -> RunHistory:
    history = RunHistory(folder)
    history.update()
    return history


def test_after_a_resume_the_later_attempt_counts_and_the_earlier_is_kept_apart(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.begin(20)
    for step in range(1, 13):
        run.step(step, 20, loss=100.0 + step)
    run.everywhere("run_start", run="run", world_size=2)
    run.everywhere("resume", step=10, world_size=2)
    for step in range(11, 16):
        run.step(step, 20, loss=float(step))
    history = read(run.folder)
    steps, losses = history.train.get("loss")
    assert list(steps) == list(range(1, 16))
    assert list(losses[9:]) == [110.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert [list(part["loss"][1]) for part in history.train.undone_parts] == [[111.0, 112.0]]
    assert all(list(history.profile[rank].steps) == list(range(1, 16)) for rank in (0, 1))
    restarts = [mark for mark in history.marks if mark.kind == "restart"]
    assert len(restarts) == 1 and restarts[0].step == 10 and "checkpoint of step 10" in restarts[0].text
    assert "2 logged steps were repeated" in run_view(history, run.now)["charts"][0]["note"]


def test_a_start_from_the_beginning_replaces_everything(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.begin(5)
    for step in (1, 2, 3):
        run.step(step, 5, loss=9.0)
    run.everywhere("run_start", run="run", world_size=1)
    run.step(1, 5, loss=1.0)
    history = read(run.folder)
    assert list(history.train.get("loss")[1]) == [1.0] and history.train.undone == 3


def test_a_rollback_undoes_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.begin(10)
    for step in range(1, 7):
        run.step(step, 10, loss=float(step))
    run.write("guard", guard="loss_spike", step=6, action="rollback", to_step=4, text="The loss spiked.")
    history = read(run.folder)
    assert history.train.last_step == 4
    run.step(5, 10, loss=0.5)
    assert history.update()
    assert list(history.train.get("loss")[1]) == [1.0, 2.0, 3.0, 4.0, 0.5]
    assert list(history.profile[1].steps) == [1, 2, 3, 4, 5], "rank 1 did not say that it went back, but did"


def test_a_guard_that_only_warns_undoes_nothing(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.begin(10)
    run.step(1, 10)
    run.step(2, 10)
    run.write("guard", guard="loss_spike", step=2, action="warn", to_step=0, text="High.")
    assert read(run.folder).train.last_step == 2


def test_what_every_rank_says_alike_is_told_once(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=3)
    run.begin(5)
    run.everywhere("warning", about="data", text="Something.")
    for step in range(1, 6):
        run.step(step, 5)
    history = read(run.folder)
    assert len(history.train) == 5 and sorted(history.profile) == [0, 1, 2]
    (mark,) = [mark for mark in history.marks if mark.kind == "warning"]
    assert mark.ranks == {0, 1, 2}


def test_absent_is_not_zero_and_not_a_number_is_not_absent(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.begin(5)
    run.write("profile", step=1, seconds={"step": 1.0})
    run.write("profile", step=2, seconds={"step": 1.0}, mfu=0.5, memory={"peak": None})
    run.step(3, 5, loss=math.nan)
    history = read(run.folder)
    steps, values = history.profile[0].get("mfu")
    assert list(steps) == [2, 3] and values[0] == 0.5
    assert list(history.profile[0].get("memory.peak")[0]) == [3]
    assert np.isnan(history.train.get("loss")[1]).tolist() == [True]


def test_newer_versions_unknown_events_and_nonsense_are_survived_and_told(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.begin(5)
    run.step(1, 5)
    run.raw(json.dumps({"v": 9, "time": 1.79e9, "rank": 0, "event": "telepathy", "x": 1}) + "\n")
    nonsense: list[dict[str, object]] = [
        {"event": "step", "step": "three", "loss": []}, {"event": "step", "step": -1}, {"event": "profile", "seconds": 3},
        {"event": "profile", "step": 2, "seconds": {"step": "x"}, "gpu": {"throttle": "hot"}}, {"event": "plan", "math": 7},
        {"event": "eval"}, {"event": "guard"}, {"event": "resume", "step": None}, {"event": "data", "train": [1]},
        {"event": "out_of_memory", "held": 5, "advice": {"a": 1}}, {"event": "sample", "row": {"a": 1}, "when": 3},
        {"event": "run_start", "time": "yesterday"}, {"event": "checkpoint", "step": True}, {"event": "hardware", "gpus": [[{}]]},
        {"event": "step", "step": 3, "time": float("1e300"), "loss": 1}, {"event": "warning", "text": {"no": "text"}},
    ]  # fmt: skip
    for record in nonsense:
        run.raw(json.dumps(record) + "\n")
    view = run_view(read(run.folder), run.now)
    told = " ".join(view["notes"])
    assert "telepathy" in told and "schema version 9" in told
    json.dumps(view, allow_nan=False)


@pytest.mark.parametrize("seed", range(3))
def test_no_field_that_is_not_what_it_should_be_breaks_the_page(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = showcase(tmp_path / "run", ranks=2, steps=300) if seed else script_run(tmp_path / "run")
    run.everywhere("usage", host={"rss": 1, "cpu_percent": 3.0})
    run.write(
        "out_of_memory", 1, phase="backward", step=3, held={"weights": 3}, advice=[{"setting": "a", "value": "1"}]
    )
    wrong = [None, True, -1, 10**30, 1e308, "nan", "", "text", [], [None], ["x"], [[1]], {}, {"a": None}, {"rows": 7}]

    def spoil(value: object, chances: float) -> object:
        if chance.random() < chances:
            return chance.choice(wrong)
        if isinstance(value, dict):
            return {key: spoil(item, chances) for key, item in value.items()}
        return [spoil(item, chances) for item in value] if isinstance(value, list) else value

    for path in run.folder.glob("events-rank*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        kept = [event for event in events if event["event"] not in ("profile", "step") or chance.random() < 0.1]
        # Each three times, so that most kinds are there in several wrong ways.
        spoilt = [
            {key: item if key == "event" else spoil(item, 0.08) for key, item in event.items()} for event in kept * 3
        ]
        path.write_text("".join(json.dumps(event) + "\n" for event in spoilt))
    history = read(run.folder)
    assert json.loads(embedded(run_view(history, run.now)))
    assert json.loads(embedded(compare_view([history, history], run.now)))
    [row] = RunsApi(tmp_path).runs(None)["runs"]
    assert json.dumps(row, allow_nan=False)


def test_a_run_deleted_while_it_is_watched_keeps_what_was_read(tmp_path: Path) -> None:
    run = showcase(tmp_path / "run", ranks=2, steps=300)
    history = read(run.folder)
    shutil.rmtree(run.folder)
    assert not history.update()
    assert run_view(history, run.now)["tiles"][0]["value"] == "300"


def test_a_long_run_that_is_read_in_pieces_says_so_until_it_is_read(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.begin(10)
    run.step(1, 10)
    history = RunHistory(run.folder)
    history.update(seconds=0.0)
    assert "Still reading" in run_view(history, run.now)["notes"][0]
    history.update()
    assert not history.is_behind and run_view(history, run.now)["notes"] == []


def test_events_written_between_two_looks_are_added(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.begin(10)
    history = read(run.folder)
    assert not history.update()
    run.step(1, 10)
    assert history.update() and len(history.train) == 1


def test_version_1_profiles_are_read_too(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.begin(5)
    run.write("profile", step=5, step_seconds=0.25, host_peak_bytes=7, gpu_peak_bytes=None)
    history = read(run.folder)
    assert history.profile[0].last("seconds.step") == 0.25 and history.profile[0].last("host.rss") == 7


def test_accuracy_and_entropy_of_training_and_evaluation_have_charts_of_their_own(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.begin(4)
    for step in (1, 2):
        run.everywhere("step", step=step, loss=2.0, entropy=3.0 - step, token_accuracy=step / 4)
    run.everywhere("eval", step=2, loss=1.5, entropy=0.75, token_accuracy=0.625)
    charts = {chart["id"]: chart for chart in run_view(read(run.folder), run.now)["charts"]}
    accuracy, entropy = charts["token_accuracy"], charts["entropy"]
    assert [list(series["y"]) for series in accuracy["series"]] == [[0.25, 0.5], [0.625]]
    assert [list(series["y"]) for series in entropy["series"]] == [[2.0, 1.0], [0.75]]
    assert (accuracy["latest"], entropy["latest"]) == ("50.0 %", "1.000")


def test_steps_of_a_script_that_were_done_twice_count_once(tmp_path: Path) -> None:
    history = read(script_run(tmp_path / "run").folder)
    metrics = {metric.name: metric for metric in history.metrics.all()}
    assert list(metrics["loss"].x) == list(range(1, 61)), "steps 21 to 47 were done twice"
    assert metrics["loss"].y[19] == 9.1 and metrics["loss"].y[20] == 2 / 21
    assert list(metrics["val/mAP@50"].x) == [20, 40, 60] and list(metrics["val/mAP@50"].y) == [0.11, 0.4, 0.6]
    assert (metrics["loss"].first, metrics["loss"].last) == ((1, 11.0), (60, 2 / 60))
    assert (metrics["loss"].lowest, metrics["loss"].highest) == ((60, 2 / 60), (1, 11.0))
    assert list(history.samples_per_second()[1]) == [8.0] * 60 and history.metrics.replaced == 0


def test_a_script_that_has_resumed_is_where_its_checkpoint_was_before_it_logs_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.script_start("train.py")
    for step in range(1, 6):
        run.script_step(step, loss=1.0)
    run.script_start("train.py")
    run.everywhere("resume", step=3, world_size=2)
    history = read(run.folder)
    assert history.last_step == 3 and history.metrics.all()[0].last == (3, 1.0)


def test_a_script_that_starts_again_without_resuming_replaces_all_it_logged(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.script_start("train.py")
    for step in (1, 2, 3):
        run.script_step(step, loss=9.0, **({"val/mAP": 0.5} if step == 3 else {}))
    run.script_start("train.py")
    run.script_step(1, loss=1.0)
    assert [(m.name, list(m.y)) for m in read(run.folder).metrics.all()] == [("loss", [1.0])]


def test_of_a_metric_that_several_ranks_log_the_lowest_ranks_counts(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.script_start("train.py")
    run.write("metrics", 1, step=1, values={"loss": 2.0, "only": 3.0})
    run.write("metrics", 0, step=1, values={"loss": 1.0})
    run.write("metrics", 0, step=1, values={"mAP": 0.5})
    metrics = {metric.name: (metric.rank, metric.last) for metric in read(run.folder).metrics.all()}
    assert metrics == {"loss": (0, (1, 1.0)), "mAP": (0, (1, 0.5)), "only": (1, (1, 3.0))}


def test_metrics_of_steps_that_were_never_counted_are_told_and_not_silently_lost(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=1)
    run.script_start("train.py")
    for loss in (3.0, 2.0, math.nan):
        run.write("metrics", step=0, values={"loss": "nan" if math.isnan(loss) else loss})
    for index in range(300):
        run.write("metrics", step=0, values={f"loss of {index}": 1})
    view = run_view(read(run.folder), run.now)
    assert "2 values of metrics were logged at a step that had one already" in view["notes"][0]
    assert "101 metrics are not shown" in view["notes"][1]
    assert view["metrics"]["rows"][0] == ["loss", "NaN (step 0)", "NaN (step 0)", "", ""]
