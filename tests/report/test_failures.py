"""A failure is shown once, by its cause: what the launcher found stands for what the ranks saw of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_run import FakeRun

from shardtune.launch.coordinator import Directive, end_directive
from shardtune.launch.launcher import _write_failure_file
from shardtune.lease import Lease
from shardtune.report.api import RunsApi
from shardtune.report.failures import read_failures
from shardtune.report.history import RunHistory
from shardtune.report.page import embedded
from shardtune.report.status import LEASE
from shardtune.report.view import View, run_view
from shardtune.run.findings import Finding, cause_of

BROKEN = "RuntimeError('gloo: Connection closed by peer')"


def view_of(run: FakeRun) -> View:
    history = RunHistory(run.folder)
    history.update()
    return run_view(history, run.now)


def problems(view: View) -> list[tuple[str, str, str]]:
    """(what, text, ranks) of each entry."""
    return [(what["text"], said, ranks) for _, what, said, ranks, _ in (view["problems"] or {"rows": []})["rows"]]


def kill_rank_1(run: FakeRun, step: int, *, restarts_left: int = 0) -> Directive:
    """As it is written: rank 0 sees its connection break, then both launchers' findings are put together and kept."""
    run.now += 1
    run.write("run_failed", 0, exit_code=1, text=BROKEN)
    findings = [
        Finding("peer_lost", run.now + 0.1, 0, "a", 0, text=BROKEN, exit_code=1),
        Finding("killed", run.now + 0.2, 0, "a", 1, exit_code=137, doing=f"computing a step (step {step})",
                for_memory=True),
    ]  # fmt: skip
    run.now += 3
    word = end_directive(cause_of(findings, 1), findings, restarts_left, run.now)
    _write_failure_file(word, run.folder)
    return word


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path / "run", ranks=2)
    run.begin(20)
    for step in range(1, 8):
        run.step(step, 20)
    return run


def test_a_killed_rank_is_the_cause_and_not_the_rank_that_lost_its_connection(run: FakeRun) -> None:
    kill_rank_1(run, 8)
    view = view_of(run)
    assert (view["status"], view["why"]) == (
        "failed", "Rank 1 was killed by signal 9 (SIGKILL) while computing a step (step 8); exit code 137.",
    )  # fmt: skip
    assert [line.split(":")[0] for line in view["advice"]] == [
        "The host ran out of memory", "Give the job more memory, or use fewer data workers or processes.", "more",
    ]  # fmt: skip
    assert view["advice"][-1] == "more: shardtune explain rank-killed"
    ((what, said, ranks),) = problems(view)
    assert (what, ranks) == ("failure", "1") and said.startswith("Rank 1 was killed") and "more memory" in said
    (points,) = [marks["points"] for marks in view["marks"] if marks["kind"] == "failure"]
    assert [point["x"] for point in points] == [8]


def test_the_list_of_runs_says_the_same_as_soon_as_it_is_known(run: FakeRun) -> None:
    watch = RunsApi(run.folder.parent, clock=lambda: run.now)
    before = watch.runs(None)
    assert before["runs"][0]["status"] == "running"
    kill_rank_1(run, 8)
    (row,) = watch.runs(before["cursor"])["runs"]
    assert row["status"] == "failed" and row["why"].startswith("Rank 1 was killed by signal 9 (SIGKILL)")


def test_a_page_that_is_open_gets_the_cause_after_it_had_the_consequence(run: FakeRun) -> None:
    watch = RunsApi(run.folder.parent, clock=lambda: run.now)
    run.write("run_failed", 0, exit_code=1, text=BROKEN)
    first = watch.run("run", None)
    assert first is not None and "Connection closed" in first["why"]
    kill_rank_1(run, 8)
    second = watch.run("run", first["cursor"])
    assert second is not None and second["why"].startswith("Rank 1 was killed")


def test_a_run_that_was_started_again_and_finished_is_done_and_keeps_its_failures_as_history(run: FakeRun) -> None:
    for step in (8, 9):
        kill_rank_1(run, step, restarts_left=1)
        run.now += 20
        run.everywhere("run_start", run="run", world_size=2)
        run.everywhere("resume", step=7, world_size=2)
        run.step(8, 20)
    run.end(20)
    view = view_of(run)
    assert (view["status"], view["why"], view["advice"]) == ("done", "", [])
    assert [(what, said.partition("(step")[2][:3]) for what, said, _ in problems(view)] == [
        ("failure", " 8)"), ("failure", " 9)"),
    ]  # fmt: skip
    (row,) = RunsApi(run.folder.parent, clock=lambda: run.now).runs(None)["runs"]
    assert (row["status"], row["why"]) == ("done", "")


def test_a_run_that_is_being_started_again_is_starting(run: FakeRun) -> None:
    lease = Lease.take(run.folder / LEASE)
    assert lease is not None
    kill_rank_1(run, 8, restarts_left=1)
    view = view_of(run)
    assert view["status"] == "starting" and view["why"].startswith("Restarting after: Rank 1 was killed")
    lease.release()
    assert view_of(run)["status"] == "failed", "its launcher did not live to do it"


def stop_by_guard(run: FakeRun) -> None:
    said = "The loss of step 8 is nan on rank 1."
    run.write("guard", 0, guard="non_finite", step=8, action="stop", ranks=[1], text=said, rows=["train:3"])
    run.everywhere("run_failed", exit_code=1, text=said)


def test_a_loss_that_is_no_number_is_one_entry(run: FakeRun) -> None:
    stop_by_guard(run)
    view = view_of(run)
    assert view["status"] == "failed" and "nan on rank 1" in view["why"]
    assert [(what, ranks) for what, _, ranks in problems(view)] == [("non_finite: stop", "1")]


def test_it_stays_one_entry_when_the_launcher_has_written_it_down_too(run: FakeRun) -> None:
    stop_by_guard(run)
    text = "error: The loss of step 8 is nan on rank 1.\n  why: Rows train:3.\n  fix: Lower train.learning_rate."
    findings = [Finding("known_error", run.now + rank, 0, "a", rank, text=text, exit_code=1) for rank in range(2)]
    _write_failure_file(end_directive(cause_of(findings, 1), findings, 0, run.now + 3), run.folder)
    view = view_of(run)
    assert view["why"] == "The loss of step 8 is nan on rank 1; exit code 1."
    assert view["advice"] == ["Rows train:3.", "Lower train.learning_rate."]
    assert [what for what, _, _ in problems(view)] == ["non_finite: stop"]


def test_an_exception_is_told_with_its_last_line(run: FakeRun) -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3\nValueError: no such column\n'
    findings = [Finding("error", run.now, 0, "a", 1, text=trace, doing="preparing data"),
                Finding("peer_lost", run.now + 1, 0, "a", 0, text=BROKEN)]  # fmt: skip
    _write_failure_file(end_directive(cause_of(findings, 1), findings, 0, run.now + 3), run.folder)
    assert view_of(run)["why"] == ("Rank 1 failed first while preparing data: ValueError: no such column; exit code 1.")


def test_without_findings_the_events_are_what_is_known(run: FakeRun) -> None:
    run.write("run_failed", 0, exit_code=1, text=BROKEN)
    view = view_of(run)
    assert "Connection closed" in view["why"] and [what for what, _, _ in problems(view)] == ["failure"]


def test_findings_of_an_older_version_are_read(run: FakeRun) -> None:
    word = kill_rank_1(run, 8)
    for path in (run.folder / "crash").iterdir():
        path.unlink()
    said = {"message": word.text, "exit_code": 137, "findings": list(reversed(word.findings))}
    (run.folder / "crash" / "findings.json").write_text(json.dumps(said))
    view = view_of(run)
    assert view["why"].startswith("Rank 1 was killed") and len(problems(view)) == 1


@pytest.mark.parametrize(
    "said",
    ["", "[]", "{", "null", '{"message": 3}', '{"message": "x"}', '{"message": "x", "findings": [3]}', "[" * 100_000,
     '{"message": "x", "findings": [{"time": NaN}]}', '{"message": "x", "time": Infinity, "findings": [{"time": 1}]}'],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_changes_nothing(run: FakeRun, said: str) -> None:
    before = view_of(run)
    (run.folder / "crash").mkdir()
    (run.folder / "crash" / "findings.json").write_text(said)
    assert view_of(run) == before


def test_what_is_no_plain_file_is_not_opened(run: FakeRun, tmp_path: Path) -> None:
    kill_rank_1(run, 8)
    crash = run.folder / "crash"
    kept = (crash / "findings.json").read_text()
    for path in crash.iterdir():
        path.unlink()
    os.mkfifo(crash / "findings.json")
    (tmp_path / "elsewhere.json").write_text(kept)
    (crash / "findings-20200101-000000.json").symlink_to(tmp_path / "elsewhere.json")
    (crash / "findings-20200101-000001.json").mkdir()
    assert read_failures(run.folder) == ()


def test_fields_that_are_not_what_they_should_be_break_nothing(run: FakeRun) -> None:
    kill_rank_1(run, 8)
    path = run.folder / "crash" / "findings.json"
    sound = json.loads(path.read_text())
    odd: list[Any] = [None, "x", -1, 2**70, 1.5, [], {}, True]
    for key in ("time", "exit_code", "restart", "message"):
        for value in odd:
            path.write_text(json.dumps({**sound, key: value}))
            assert view_of(run)["status"] in ("failed", "stale"), (key, value)
    for key in ("time", "rank", "doing", "kind"):
        for value in odd:
            findings = [{**sound["findings"][0], key: value}, *sound["findings"][1:]]
            path.write_text(json.dumps({**sound, "findings": findings}))
            assert view_of(run)["status"] in ("failed", "stale"), (key, value)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "run.json", "events-rank1.jsonl"])
def test_a_pipe_in_a_runs_folder_is_not_waited_for_and_a_link_is_not_shown(
    run: FakeRun, tmp_path: Path, name: str
) -> None:
    """One such folder would hold up a dashboard for everybody, or publish a file that somebody else may not read."""
    path = run.folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert view_of(run)["status"] == "running"
    assert RunsApi(run.folder.parent).runs(None)["runs"]
    path.unlink()
    (tmp_path / "private").write_text('password: hunter2\n{"password": "hunter2"}\n')
    path.symlink_to(tmp_path / "private")
    assert "hunter2" not in embedded(view_of(run))
