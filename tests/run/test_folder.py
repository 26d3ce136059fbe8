from __future__ import annotations

import multiprocessing
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from shardtune.errors import UserInputError
from shardtune.run import folder as run_folder_module
from shardtune.run.folder import LEASE, RunFolder, create_run_folder, hold_run_folder, new_run_id


def create(output_dir: Path | str, run_id: str | None = None) -> Path:
    """As a process that has ended since: nobody holds the folder any more."""
    held = create_run_folder(str(output_dir), run_id)
    held.lease.release()
    return held.path


def refusal(output_dir: Path | str, run_id: str | None = None) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        create_run_folder(str(output_dir), run_id)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_run_gets_an_empty_folder_of_its_own_and_holds_it(tmp_path: Path) -> None:
    held = create_run_folder(str(tmp_path / "deep" / "größe"), "first")
    assert held.path == tmp_path / "deep" / "größe" / "first" and held.created
    assert [entry.name for entry in held.path.iterdir()] == [LEASE]
    assert f"process {os.getpid()}" in refusal(tmp_path / "deep" / "größe", "first").why
    held.lease.release()
    assert list(held.path.iterdir()) == []


def _ask_for_one_name(output_dir: Path, start: Any, answers: multiprocessing.SimpleQueue, done: Any) -> None:
    start.wait()  # both are there
    try:
        held = create_run_folder(str(output_dir), "same")
    except UserInputError as error:
        answers.put(error.what)
    else:
        answers.put("mine")
        done.wait()  # as a run that goes on: the other must not get it in the meantime
        held.lease.release()


def test_of_two_processes_that_ask_for_one_name_at_once_one_gets_it(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for number in range(40):
        answers, start, done = fork.SimpleQueue(), fork.Barrier(2), fork.Event()
        output_dir = tmp_path / str(number)
        arguments = (output_dir, start, answers, done)
        both = [fork.Process(target=_ask_for_one_name, args=arguments) for _ in range(2)]
        for process in both:
            process.start()
        told = sorted(answers.get() for _ in both)
        done.set()
        for process in both:
            process.join()
        assert told.count("mine") == 1 and "same" in next(text for text in told if text != "mine"), told
        assert (output_dir / "same").is_dir()


def test_a_folder_that_was_refused_is_deleted_only_by_its_maker_and_only_while_nothing_was_trained(
    tmp_path: Path,
) -> None:
    def started(name: str, *more: str) -> RunFolder:
        held = create_run_folder(str(tmp_path), name)
        for file in ("run.json", "config.yaml", "environment.json", "events-rank0.jsonl", "crash/findings.json", *more):
            (held.path / file).parent.mkdir(exist_ok=True)
            (held.path / file).write_text("x")
        return held

    assert started("refused").discard_untrained() and not (tmp_path / "refused").exists()
    for name, more in (("trained", "checkpoints/step-000005"), ("done", "final/adapter"), ("noted", "my-notes.txt")):
        held = started(name, more)
        before = sorted(held.path.rglob("*"))
        assert not held.discard_untrained() and sorted(held.path.rglob("*")) == before
    found = started("found")
    found.lease.release()
    assert not hold_run_folder(found.path).discard_untrained() and (found.path / "config.yaml").exists()


def test_a_runs_folder_is_private_unless_it_is_opened_to_the_group(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        assert stat.S_IMODE(create(tmp_path, "mine").stat().st_mode) == 0o700
        opened = create_run_folder(str(tmp_path), "ours", "group").path
        (opened / "events-rank0.jsonl").touch()
        assert stat.S_IMODE(opened.stat().st_mode) == 0o750
        assert (opened / "events-rank0.jsonl").stat().st_mode & 0o040
        hold_run_folder(tmp_path / "mine", "group")
        assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o750
    finally:
        os.umask(mask)
    (tmp_path / "shared").mkdir(mode=0o755)
    assert stat.S_IMODE(create(tmp_path, "shared").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", [LEASE, "config.yaml", "events-rank0.jsonl", "checkpoints", "crash/rank-0.txt"])
def test_a_folder_with_a_link_in_it_is_refused_and_what_it_leads_to_is_untouched(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = create(tmp_path, "run")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(precious)
    with pytest.raises(UserInputError, match=f"where a run writes: {re.escape(name)}"):
        hold_run_folder(folder)
    assert "links or pipes" in refusal(tmp_path, "run").what
    assert precious.read_text() == "precious"


def test_a_pipe_where_a_run_writes_is_refused_and_a_link_of_ones_own_elsewhere_is_not(tmp_path: Path) -> None:
    folder = create(tmp_path, "run")
    (folder / "notes").symlink_to(tmp_path)
    hold_run_folder(folder).lease.release()
    os.mkfifo(folder / "events-rank0.jsonl")
    with pytest.raises(UserInputError, match=r"links or pipes where a run writes: events-rank0\.jsonl"):
        hold_run_folder(folder)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link" in refusal(tmp_path, "run").what
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create(tmp_path, "run")
    os.chown(folder, 12345, 12345)
    problem = refusal(tmp_path, "run")
    assert "belongs to another user" in problem.what and "12345" in problem.why
    with pytest.raises(UserInputError, match="belongs to another user"):
        hold_run_folder(folder)
    # A mount that gives every file to one user: what this process makes there has that owner, too.
    monkeypatch.setattr(run_folder_module, "_uid_of_new_files", lambda where: 12345)
    hold_run_folder(folder).lease.release()


def test_ids_of_runs_started_together_differ_and_sort_by_time(tmp_path: Path) -> None:
    ids = {new_run_id() for _ in range(20)}
    assert len(ids) > 15
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run_id) for run_id in ids)
    assert create(tmp_path) != create(tmp_path)


def test_the_folder_is_absolute_and_a_tilde_is_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert create("runs", "a") == tmp_path / "runs" / "a"
    assert create("~/runs", "a") == tmp_path / "home" / "runs" / "a"


def test_an_existing_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    held = create_run_folder(str(tmp_path), "mine")
    assert held.path == tmp_path / "mine" and not held.created


def test_a_run_that_has_written_something_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("precious")
    problem = refusal(tmp_path, "mine")
    assert "'mine' already exists" in problem.what
    assert str(tmp_path / "mine") in problem.what
    assert "not empty" in problem.why
    assert "--run-id" in problem.fix
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("name", ["..", "a/b", "/etc", " a", "a\n", "-x", ".hidden", "x" * 101, "a:b"])
def test_an_id_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    problem = refusal(tmp_path, name)
    assert "--run-id" in problem.what
    assert "letters, digits" in problem.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/deeper"])
def test_a_file_in_the_way_is_told(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("x")
    problem = refusal(tmp_path / where, "run")
    assert "Cannot write to the run's folder" in problem.what
    assert str(tmp_path) in problem.what
    assert "Not a directory" in problem.why
    assert "train.output_dir" in problem.fix


def test_a_place_the_system_refuses_is_told() -> None:
    problem = refusal("/proc/shardtune", "run")  # not even root may write there
    assert "/proc/shardtune/run" in problem.what
    assert f"user {os.geteuid()}" in problem.why


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_told(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "Permission denied" in refusal(tmp_path / "locked", "run").why


def test_a_run_that_has_logged_a_step_is_never_deleted(tmp_path: Path) -> None:
    run = create_run_folder(str(tmp_path), "r")
    log = run.path / "events-rank0.jsonl"
    log.write_text('{"v": 2, "rank": 0, "event": "step", "step": 1}\n')
    assert not run.discard_untrained() and log.exists()
    log.write_text('{"v": 2, "rank": 0, "event": "run_start"}\n')
    assert run.discard_untrained() and not run.path.exists()
    run.lease.release()
