"""Which run a command means, decided from what lies in the output folder."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from small_disk import fill, small_disk

from shardtune.checkpoint.changes import identity, kept_settings
from shardtune.checkpoint.store import CheckpointStore
from shardtune.config import load_config
from shardtune.config.schema import RunConfig
from shardtune.errors import UserInputError
from shardtune.run import which_run
from shardtune.run.folder import RECORD
from shardtune.run.which_run import ChosenRun, read_run, record_finish, record_start


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def config(folder: Path, resume: str = "auto", **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": "m"},
            "data": {"dataset_name_or_path": "d"},
            "train": {"output_dir": str(folder), "resume": resume, **train},
        }
    )


def choose_run(config: RunConfig, run_id: str | None) -> ChosenRun:
    """As a process that has ended since: nobody holds the run any more."""
    choice = which_run.choose_run(config, run_id)
    choice.run_folder.lease.release()
    return choice


def make(folder: Path, name: str, *steps: int, finished: bool = False, best: int | None = None, **train: Any) -> Path:
    """A run with checkpoints, started after those made before it."""
    run = folder / name
    run.mkdir(parents=True)
    record_start(run, config(folder, **train))
    store = CheckpointStore(run / "checkpoints", keep=None)
    mine = config(folder, **train)
    asked = {"identity": identity(mine), "settings": kept_settings(mine)}

    def fill(path: Path) -> None:
        (path / "trainer.json").write_text(json.dumps({"asked": asked}))

    for step in steps:
        eval_loss = {"eval_loss": 1.0 if step == best else 2.0} if best is not None else {}
        store.write(step, fill, {"time": time.time(), **eval_loss})
    if finished:
        record_finish(run, config(folder, **train))
    time.sleep(0.002)
    return run


def test_auto_goes_on_with_the_newest_unfinished_run_of_the_same_config(tmp_path: Path) -> None:
    make(tmp_path, "a", 5)
    wanted = make(tmp_path, "b", 5)
    make(tmp_path, "other", 5, learning_rate=0.5)
    make(tmp_path, "empty")
    chosen = choose_run(config(tmp_path), None)
    assert (chosen.folder, chosen.created) == (wanted, False) and "b" in chosen.notice


def test_auto_finds_a_run_by_what_references_stand_for(tmp_path: Path) -> None:
    def from_environment(rate: str) -> RunConfig:
        (tmp_path / "run.yaml").write_text(
            "model: {model_name_or_path: m}\ndata: {dataset_name_or_path: d}\n"
            f"train:\n  output_dir: {tmp_path / 'runs'}\n  learning_rate: ${{RATE}}\n"
        )
        return load_config(tmp_path / "run.yaml", environ={"RATE": rate}).config

    wanted = make(tmp_path / "runs", "a", 5, learning_rate=0.173519)
    record_start(wanted, from_environment("0.173519"))
    assert "173519" not in (wanted / RECORD).read_text()
    assert choose_run(from_environment("0.173519"), None).folder == wanted
    other = choose_run(from_environment("0.2"), None)
    assert other.created and "train.learning_rate: ${RATE} has another value" in other.notice


def test_auto_starts_anew_after_a_finished_run_and_says_so(tmp_path: Path) -> None:
    done = make(tmp_path, "a", 5, finished=True)
    chosen = choose_run(config(tmp_path), None)
    assert chosen.created and chosen.folder != done and "a, is finished" in chosen.notice
    assert choose_run(config(tmp_path / "elsewhere"), None).notice == ""


def test_auto_does_not_take_another_configs_run_and_says_what_differs(tmp_path: Path) -> None:
    make(tmp_path, "a", 5, learning_rate=0.5)
    chosen = choose_run(config(tmp_path), None)
    assert chosen.created
    assert "--run-id a --resume latest" in chosen.notice and "train.learning_rate: 0.5 → 0.0001" in chosen.notice


def test_auto_takes_a_run_that_became_longer_or_is_logged_otherwise(tmp_path: Path) -> None:
    run = make(tmp_path, "a", 5)
    assert choose_run(config(tmp_path, max_steps=99, logging_steps=1, save_minutes=3), None).folder == run


def test_never_starts_anew_and_never_over_another(tmp_path: Path) -> None:
    make(tmp_path, "a", 5)
    assert choose_run(config(tmp_path, "never"), None).created
    with pytest.raises(UserInputError, match="already exists"):
        choose_run(config(tmp_path, "never"), "a")


@pytest.mark.parametrize(
    ("changed", "processes", "line"),
    [
        ({"seed": 3}, 2, "train.seed: 42 → 3"),
        ({"learning_rate": 0.5}, 1, "rows per step: 16 → 8"),
        ({"learning_rate": 0.5, "max_steps": 4}, 2, "train.max_steps: 4 is below step 5"),
    ],
)
def test_going_on_is_offered_only_where_it_would_be_accepted(
    tmp_path: Path, changed: dict[str, Any], processes: int, line: str
) -> None:
    run = make(tmp_path, "a", 5)
    saved = run / "checkpoints" / "step-000005" / "trainer.json"
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "batch": {"effective": 16}}))
    mine = config(tmp_path, **changed)
    with pytest.raises(UserInputError) as refused:
        which_run.choose_run(mine, "a", processes)
    assert line in refused.value.why and "--resume latest" not in refused.value.fix
    chosen = which_run.choose_run(mine, None, processes)
    chosen.run_folder.lease.release()
    assert line in chosen.notice and "--resume latest" not in chosen.notice
    chosen = which_run.choose_run(config(tmp_path, learning_rate=0.25), None, 2)
    chosen.run_folder.lease.release()
    assert "(to resume it: --run-id a --resume latest)" in chosen.notice


def test_a_named_run_goes_on_if_it_is_the_same_and_unfinished(tmp_path: Path) -> None:
    run, empty = make(tmp_path, "a", 5), make(tmp_path, "empty")
    make(tmp_path, "done", 5, finished=True)
    assert choose_run(config(tmp_path), "a").folder == run
    # Killed before its first checkpoint, and requeued with the same command: it begins again in its own folder.
    again = choose_run(config(tmp_path), "empty")
    assert (again.folder, again.created) == (empty, False)
    with pytest.raises(UserInputError, match=r"(?s)already exists.*finished"):
        choose_run(config(tmp_path), "done")
    with pytest.raises(UserInputError, match=r"(?s)already exists.*train.learning_rate: 0.0001 → 0.5.*--resume latest"):
        choose_run(config(tmp_path, learning_rate=0.5), "a")
    with pytest.raises(UserInputError, match="not a valid folder name"):
        choose_run(config(tmp_path / "x"), "../a")


def test_latest_is_the_newest_run_with_a_checkpoint_and_prefers_the_same_config(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no run with a checkpoint"):
        choose_run(config(tmp_path, "latest"), None)
    mine = make(tmp_path, "a", 5, finished=True)
    other = make(tmp_path, "b", 5, learning_rate=0.5)
    assert choose_run(config(tmp_path, "latest"), None).folder == mine
    assert choose_run(config(tmp_path, "latest", learning_rate=0.3), None).folder == other
    with pytest.raises(UserInputError, match="'nobody' has no checkpoint"):
        choose_run(config(tmp_path, "latest"), "nobody")


def test_best_goes_on_in_place_only_where_nothing_came_after_it(tmp_path: Path) -> None:
    run = make(tmp_path / "one", "a", 5, 10, best=10)
    assert choose_run(config(tmp_path / "one", "best"), None).folder == run
    run = make(tmp_path / "two", "a", 5, 10, 15, best=5)
    chosen = choose_run(config(tmp_path / "two", "best"), None)
    assert chosen.created and "from a copy" in chosen.notice
    store = CheckpointStore(chosen.folder / "checkpoints", None)
    assert store.steps() == [5] and store.newest_intact() == (5, [])
    assert CheckpointStore(run / "checkpoints", None).steps() == [5, 10, 15]
    make(tmp_path / "three", "a", 5)
    with pytest.raises(UserInputError, match="has an evaluation loss"):
        choose_run(config(tmp_path / "three", "best"), None)


def test_a_path_may_be_a_run_or_any_checkpoint_and_brings_the_best_before_it_along(tmp_path: Path) -> None:
    run = make(tmp_path, "a", 5, 10, 15, 20, best=5)
    assert choose_run(config(tmp_path, str(run)), None).folder == run
    assert choose_run(config(tmp_path, str(run / "checkpoints/step-000020")), None).folder == run
    chosen = choose_run(config(tmp_path, str(run / "checkpoints/step-000015")), "fork")
    assert chosen.folder == tmp_path / "fork"
    store = CheckpointStore(chosen.folder / "checkpoints", None)
    assert store.steps() == [5, 15] and store.best() == (5, 1.0)
    # It is a run like any other: the same config finds it again.
    assert choose_run(config(tmp_path), None).folder == chosen.folder


@pytest.mark.parametrize("damage", ["trainer.json", "manifest.json"])
def test_a_path_to_a_damaged_checkpoint_is_an_error_that_names_the_file(tmp_path: Path, damage: str) -> None:
    run = make(tmp_path, "a", 5, 10)
    path = run / "checkpoints" / "step-000005"
    (path / damage).write_text("{}")
    with pytest.raises(UserInputError, match=rf"(?s)step-000005 is damaged.*{damage}"):
        choose_run(config(tmp_path, str(path)), None)


def test_a_path_to_something_else_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="neither a checkpoint nor a run"):
        choose_run(config(tmp_path, str(tmp_path)), None)


BROKEN = ["", "[]", "{", json.dumps({"identity": 1}), None]


def spoil(run: Path, content: str | None) -> None:
    (run / RECORD).unlink()
    if content is not None:
        (run / RECORD).write_text(content)


@pytest.mark.parametrize("content", BROKEN)
def test_a_run_whose_record_is_lost_goes_on_from_its_checkpoints_and_says_so(
    tmp_path: Path, content: str | None
) -> None:
    run = make(tmp_path, "a", 5, 10)
    spoil(run, content)
    for wanted in (choose_run(config(tmp_path), None), choose_run(config(tmp_path), "a")):
        assert (wanted.folder, wanted.created) == (run, False)
        assert "run.json of the run a is" in wanted.notice and "step 10" in wanted.notice
    assert choose_run(config(tmp_path, "latest"), None).folder == run
    assert choose_run(config(tmp_path, str(run)), None).folder == run
    # It is still that run and no other.
    chosen = choose_run(config(tmp_path, learning_rate=0.5), None)
    assert chosen.created and "the config of the unfinished run a differs" in chosen.notice


def test_a_run_whose_record_is_lost_is_finished_where_its_final_adapter_came_last(tmp_path: Path) -> None:
    run = make(tmp_path, "a", 5)
    spoil(run, None)
    (run / "final").mkdir()
    assert "a, is finished" in choose_run(config(tmp_path), None).notice
    os.utime(run / "final", (1, 1))  # it was finished, and then trained further
    again = read_run(run)
    assert again is not None and not again.finished


def test_checkpoints_that_nothing_can_be_read_of_are_never_passed_over_in_silence(tmp_path: Path) -> None:
    run = make(tmp_path, "a", 5)
    spoil(run, "{")
    (run / "checkpoints" / "step-000005" / "manifest.json").write_text("{")
    assert read_run(run) is None
    chosen = choose_run(config(tmp_path), None)
    assert chosen.created and f"{run} has checkpoints, but neither its run.json nor any of them" in chosen.notice


def test_a_link_or_a_file_in_place_of_the_only_checkpoint_is_said(tmp_path: Path) -> None:
    run = make(tmp_path, "a")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-000010").symlink_to(make(tmp_path, "b", 5, seed=1) / "checkpoints" / "step-000005")
    (run / "checkpoints" / "step-000015").write_text("")
    chosen = choose_run(config(tmp_path), "a")
    assert chosen.folder == run
    assert "step-000010 is a link or a file" in chosen.notice and "step-000015 is a link or a file" in chosen.notice


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_a_folder_of_another_user_beside_ours_does_not_matter() -> None:
    """Folders are private: in an output folder that several people use, nobody can look into the others' runs."""
    with tempfile.TemporaryDirectory() as name:  # tmp_path itself lets nobody else in
        shared = Path(name)
        make(shared, "theirs", 5).chmod(0o700)
        shared.chmod(0o777)
        if (child := os.fork()) == 0:
            with contextlib.ExitStack() as at_end:
                at_end.callback(os._exit, 1)
                os.seteuid(12345)
                if choose_run(config(shared, seed=1), None).created:
                    os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_auto_passes_over_the_run_of_another_user_and_says_so(tmp_path: Path) -> None:
    theirs = make(tmp_path, "theirs", 5)
    os.chown(theirs, 12345, 12345)
    chosen = choose_run(config(tmp_path), None)
    assert chosen.created and "belongs to another user. It is skipped." in chosen.notice
    with pytest.raises(UserInputError, match="belongs to another user"):
        choose_run(config(tmp_path), "theirs")


def test_a_pipe_in_place_of_the_record_is_not_waited_for(tmp_path: Path) -> None:
    run = make(tmp_path, "a", 5)
    spoil(run, None)
    os.mkfifo(run / RECORD)
    found = read_run(run)
    assert found is not None and "cannot be read (not a plain file)" in found.notice


def test_a_run_whose_record_was_lost_while_it_trained_can_finish(tmp_path: Path) -> None:
    run = make(tmp_path, "a", 5)
    spoil(run, "{")
    record_finish(run, config(tmp_path))
    finished = read_run(run)
    assert finished is not None and finished.finished and not finished.notice
    assert "a, is finished" in choose_run(config(tmp_path), None).notice


def test_a_new_run_on_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        with pytest.raises(UserInputError, match="Cannot write to the run's folder") as caught:
            choose_run(config(disk / "runs"), "a")
        assert "No space left on device" in caught.value.why
        assert not (disk / "runs" / "a").exists()


def test_an_empty_folder_without_a_record_is_no_run(tmp_path: Path) -> None:
    spoil(make(tmp_path, "a"), "")
    assert read_run(tmp_path / "a") is None
    assert choose_run(config(tmp_path), None).created
