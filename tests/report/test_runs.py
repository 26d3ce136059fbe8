"""Which runs there are and how they stand, from the ends of their files."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from fake_run import FakeRun, script_run

from shardtune.errors import UserInputError
from shardtune.launch.rank_output import LOGS
from shardtune.lease import Lease, is_held, looks_alive
from shardtune.report import runs, script
from shardtune.report.api import RunsApi
from shardtune.report.history import RunHistory
from shardtune.report.results import results_of
from shardtune.report.runs import RunList, find_run, is_run_name, is_run_path
from shardtune.report.status import LEASE, STALE_SECONDS, STOPPED
from shardtune.run.exit_codes import INTERRUPTED, PREEMPTED, TERMINATED
from shardtune.run.folder import _NAME, RECORD, SCRIPT
from shardtune.run.folder import LEASE as LAUNCH_LEASE


def begun(folder: Path, steps: int = 3, **how: object) -> FakeRun:
    run = FakeRun(folder, ranks=2)
    run.begin(100)
    for step in range(1, steps + 1):
        run.step(step, 100)
    return run


def state(root: Path, now: float) -> str:
    (row,) = RunList(root).rows(now)
    history = RunHistory(root / row.name)
    history.update()
    assert results_of(history, now).status == row.status, "list and page must say the same"
    return row.status.state


def test_names_are_those_the_launcher_uses() -> None:
    assert LEASE == LAUNCH_LEASE and runs._RECORD == RECORD and runs._NAME.pattern == _NAME.pattern
    assert (script.KIND, script.LOGS, set(STOPPED)) == (SCRIPT, LOGS, {PREEMPTED, INTERRUPTED, TERMINATED})


def test_a_run_that_writes_is_running_and_one_that_is_quiet_for_long_is_stale(tmp_path: Path) -> None:
    run = begun(tmp_path / "one")
    assert state(tmp_path, run.now + 5) == "running"
    assert state(tmp_path, run.now + STALE_SECONDS + 60) == "stale"


def test_its_last_word_decides(tmp_path: Path) -> None:
    run = begun(tmp_path / "one")
    run.end(3, "stopped")
    assert state(tmp_path, run.now) == "stopped"
    run.now += 1
    run.everywhere("run_start", run="one", world_size=2)
    assert state(tmp_path, run.now) == "starting"
    run.step(4, 100)
    assert state(tmp_path, run.now) == "running"
    run.end(100)
    assert state(tmp_path, run.now + 1e6) == "done"


def test_a_failure_on_any_rank_is_a_failure_of_the_run(tmp_path: Path) -> None:
    run = begun(tmp_path / "one")
    run.write("out_of_memory", 1, phase="backward", step=3)
    assert state(tmp_path, run.now) == "failed"
    run.now += 1
    run.everywhere("run_start", run="one", world_size=2)
    assert state(tmp_path, run.now) == "starting", "it was started again since"


def test_a_run_whose_process_is_gone_has_failed_at_once(tmp_path: Path) -> None:
    run = begun(tmp_path / "one")
    said = {"host": socket.gethostname(), "pid": 2**22 + 5, "started": "17"}
    (tmp_path / "one" / LEASE).write_text(json.dumps(said))
    assert state(tmp_path, run.now + 1) == "failed"


def test_a_run_that_is_alive_but_quiet_is_running(tmp_path: Path) -> None:
    run = begun(tmp_path / "one")
    lease = Lease.take(tmp_path / "one" / LEASE)
    assert lease is not None
    try:
        assert state(tmp_path, run.now + 10 * STALE_SECONDS) == "running"
    finally:
        lease.release()


def test_a_run_is_starting_until_its_first_step_and_not_stale(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "one", ranks=2)
    record = {"format": 1, "identity": "x", "settings": {}, "started": run.now, "finished": False}
    (run.folder / "run.json").write_text(json.dumps(record))
    assert state(tmp_path, run.now + 30) == "stopped", "no event, and nobody holds it: it was stopped at once"
    lease = Lease.take(run.folder / LEASE)
    assert lease is not None
    try:
        assert state(tmp_path, run.now + 30) == "starting"
        run.begin(100)
        assert state(tmp_path, run.now + 30) == "starting", "it loads its weights"
        run.step(1, 100)
        assert state(tmp_path, run.now + 30) == "running"
    finally:
        lease.release()


def test_an_ended_run_that_a_process_has_taken_since_is_starting(tmp_path: Path) -> None:
    run = begun(tmp_path / "one")
    run.write("run_end", status="stopped", step=3)
    assert state(tmp_path, run.now) == "stopped"
    lease = Lease.take(run.folder / LEASE)
    assert lease is not None
    try:
        os.utime(run.folder / LEASE, (run.now - 60, run.now - 60))
        assert state(tmp_path, run.now) == "stopped", "the process that wrote it has not left yet"
        os.utime(run.folder / LEASE, (run.now + 60, run.now + 60))
        assert state(tmp_path, run.now) == "starting"
    finally:
        lease.release()
    assert state(tmp_path, run.now) == "stopped", "what took it was refused"


def test_looking_at_a_lease_does_not_hold_it(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path / "lease")
    assert lease is not None and looks_alive(tmp_path / "lease") is True and is_held(tmp_path / "lease")
    lease.release()
    (tmp_path / "lease").write_text(json.dumps({"host": "elsewhere", "pid": os.getpid(), "started": "1"}))
    assert looks_alive(tmp_path / "lease") is None
    (tmp_path / "lease").write_text('{"host"')
    assert looks_alive(tmp_path / "lease") is None


def test_a_thousand_runs_are_read_once_and_then_only_where_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run-0000")
    events = (tmp_path / "run-0000" / "events-rank0.jsonl").read_bytes()
    for index in range(1, 1000):
        folder = tmp_path / f"run-{index:04d}"
        folder.mkdir()
        (folder / "events-rank0.jsonl").write_bytes(events)
    listed = RunList(tmp_path)
    assert len(listed.rows(run.now)) == 1000
    read: list[str] = []
    original = runs.summary
    monkeypatch.setattr(runs, "summary", lambda first, *rest: read.append(first.parent.name) or original(first, *rest))
    run.step(4, 100)
    rows = {row.name: row for row in listed.rows(run.now)}
    assert read == ["run-0000"] and rows["run-0000"].summary.step == 4 and rows["run-0999"].summary.step == 3


def test_only_the_ends_of_a_long_file_are_read(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "one", ranks=1)
    run.begin(9000)
    run.raw('{"event": "noise", "text": "%s"}\n' % ("x" * 1000) * 3000)
    run.step(7, 9000, loss=0.25)
    run.raw('{"event": "step", "step": 8, "lo')
    (row,) = RunList(tmp_path).rows(run.now)
    assert (row.summary.steps, row.summary.step, row.summary.loss) == (9000, 7, 0.25)


def test_what_is_no_run_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").touch()
    begun(tmp_path / ".hidden")
    assert RunList(tmp_path).rows(0.0) == [] and RunList(tmp_path / "gone").rows(0.0) == []


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "..%2f", "a\\b", "\0", "a" * 101, "-x", "é"])
def test_a_name_that_leads_elsewhere_is_none(name: str) -> None:
    assert not is_run_name(name)


def test_runs_in_a_folder_that_groups_them_are_listed_and_found(tmp_path: Path) -> None:
    run = begun(tmp_path / "runs" / "quickstart" / "one")
    (tmp_path / "runs" / "quickstart" / "data").mkdir()
    begun(tmp_path / "runs" / "two")
    begun(tmp_path / "elsewhere" / "three")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    assert {row.name for row in RunList(tmp_path / "runs").rows(run.now)} == {"quickstart/one", "two"}
    assert find_run("one", tmp_path / "runs") == find_run("quickstart/one", tmp_path / "runs") == run.folder
    assert is_run_path("quickstart/one") and not any(map(is_run_path, ("a/b/c", "../a", "a/..", "a//b", "/a")))


def test_a_run_is_found_by_id_and_by_folder(tmp_path: Path) -> None:
    begun(tmp_path / "runs" / "one")
    assert find_run("one", tmp_path / "runs") == find_run(str(tmp_path / "runs" / "one"), Path("elsewhere"))
    with pytest.raises(UserInputError, match="no run 'two'"):
        find_run("two", tmp_path / "runs")


def test_without_a_folder_given_runs_are_found_in_every_folder_here_that_holds_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("outputs/20260101-a", "outputs/20260102-b", "more/20260103-c"):
        begun(tmp_path / name)
    assert runs.runs_dirs() == [Path("runs"), Path("more"), Path("outputs")]
    assert find_run("20260101-a", None) == tmp_path / "outputs" / "20260101-a"
    assert find_run("20260103", None) == tmp_path / "more" / "20260103-c"
    with pytest.raises(UserInputError, match="3 runs start with"):
        find_run("2026", None)
    with pytest.raises(UserInputError, match="There is no run"):
        find_run("20260101-a", Path("more"))
    with pytest.raises(UserInputError, match="'outputs' is a folder of runs, not a run") as folder:
        find_run("outputs", None)
    assert folder.value.fix == "Give one of them, such as outputs/20260102-b."


def test_a_profiled_trainers_run_is_listed_with_its_model(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "script", ranks=1)
    run.profiled("toys/dense")
    (row,) = RunList(tmp_path).rows(run.now)
    assert row.summary.model == "toys/dense"


def test_a_script_is_listed_with_its_last_step_and_its_validation_metric(tmp_path: Path) -> None:
    run = script_run(tmp_path / "one")
    FakeRun(tmp_path / "plain", ranks=1).script_start("plain.py")
    cells = {row["name"]: row["cells"] for row in RunsApi(tmp_path, lambda: run.now).runs(None)["runs"]}
    shown = {name: [cell[0] for cell in row.values()][:5] for name, row in cells.items()}
    assert shown == {
        "one": ["train.py", "2", "60", "0.0333", "val/mAP@50 0.6"],
        "plain": ["plain.py", "1", "", "", ""],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "status"), [(0, "done"), (1, "failed"), (75, "stopped"), (130, "stopped"), (137, "failed")]
)
def test_the_exit_code_of_a_script_decides_where_no_rank_could_say_how_it_ended(
    tmp_path: Path, code: int, status: str
) -> None:
    run = FakeRun(tmp_path / "one", ranks=2)
    run.script_start("train.py")
    assert state(tmp_path, run.now + 1) == "running", "a script need not have any steps"
    run.script("train.py", exit_code=code, ended=run.now + 60)
    assert state(tmp_path, run.now + 90) == status
    run.now += 100
    run.script("train.py")
    assert state(tmp_path, run.now + 1) == "starting", "its ranks have not started again yet"


def test_a_run_may_be_given_as_a_shell_completes_its_folder_and_a_folder_of_runs_has_to_exist(tmp_path: Path) -> None:
    run = begun(tmp_path / "runs" / "one")
    assert find_run("one/", tmp_path / "runs") == find_run(f"{run.folder}/", None) == run.folder
    (tmp_path / "file").touch()
    for folder, why in (("nowhere", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(UserInputError, match=f"--runs-dir '{tmp_path / folder}' {why}"):
            find_run("one", tmp_path / folder)
