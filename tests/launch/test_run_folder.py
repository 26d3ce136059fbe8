from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shardtune.errors import UserInputError
from shardtune.launch.run_folder import create_run_folder, new_run_id


def refusal(output_dir: Path | str, run_id: str | None = None) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        create_run_folder(str(output_dir), run_id)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_run_gets_an_empty_folder_of_its_own(tmp_path: Path) -> None:
    folder = create_run_folder(str(tmp_path / "deep" / "größe"), "first")
    assert folder == tmp_path / "deep" / "größe" / "first"
    assert list(folder.iterdir()) == []


def test_ids_of_runs_started_together_differ_and_sort_by_time(tmp_path: Path) -> None:
    ids = {new_run_id() for _ in range(20)}
    assert len(ids) > 15
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run_id) for run_id in ids)
    assert create_run_folder(str(tmp_path)) != create_run_folder(str(tmp_path))


def test_the_folder_is_absolute_and_a_tilde_is_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert create_run_folder("runs", "a") == tmp_path / "runs" / "a"
    assert create_run_folder("~/runs", "a") == tmp_path / "home" / "runs" / "a"


def test_an_existing_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert create_run_folder(str(tmp_path), "mine") == tmp_path / "mine"


def test_a_run_that_has_written_something_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("precious")
    problem = refusal(tmp_path, "mine")
    assert "'mine' exists already" in problem.what
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
    assert "cannot be written" in problem.what
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
