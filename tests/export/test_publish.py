"""An export appears whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from export.exporting import Quiet, export
from interrupted_lines import interrupted
from safetensors.torch import load_file
from small_disk import small_disk
from tuned_toys import tuned_toy

from shardtune import durable, lease
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.export import publish
from shardtune.export.publish import check_out, staged
from shardtune.export.request import ExportRequest, default_out
from shardtune.export.run import export_model
from shardtune.inference.source import find_tuned

_KILLED = """
import os, signal, sys
from pathlib import Path
from shardtune.export.publish import staged
with staged(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print(folder.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    tuned_toy("dense", folder)
    return folder


def test_what_is_there_is_not_overwritten(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserInputError, match="exists already and is not empty"):
        export(toy / "adapter", tmp_path)
    with pytest.raises(UserInputError, match="exists already"):
        export(toy / "adapter", tmp_path / "mine")
    (tmp_path / "link").symlink_to(toy)
    with pytest.raises(UserInputError, match="exists already"):
        export(toy / "adapter", tmp_path / "link")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "mine"]
    with pytest.raises(UserInputError, match="exists already"):
        export(toy / "adapter", toy / "base")
    (tmp_path / "empty").mkdir()
    export(toy / "adapter", tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_of_an_existing_default_folder_no_option_is_named_that_was_not_given(toy: Path) -> None:
    tuned = find_tuned(str(toy / "adapter"))
    there = default_out(tuned, "merged")
    there.mkdir()
    (there / "mine").write_text("mine")
    with pytest.raises(UserInputError) as refused:
        export_model(ExportRequest(tuned, "merged", there), Quiet())
    assert refused.value.what == f"{there} exists already and is not empty."
    assert refused.value.fix == "Remove it, or give --out FOLDER."


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_file_system_without_any_space_is_not_said_to_be_full() -> None:
    if not os.access("/proc", os.W_OK):
        pytest.skip("/proc is read-only to this user, which is said first")
    with pytest.raises(UserInputError, match="/proc is on a file system that holds no files of its users"):
        check_out(Path("/proc/out"), 1)


def test_a_folder_without_a_name_of_its_own_is_refused(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there already, and cannot be renamed to."""
    monkeypatch.chdir(tmp_path)
    for out in (Path(), Path("x/..")):
        with pytest.raises(UserInputError, match="not the name of a new folder"):
            export(toy / "adapter", out)


def test_a_failure_leaves_nothing_not_even_the_folders_above(tmp_path: Path) -> None:
    for raised in (KeyboardInterrupt(), ValueError("of the writer")):
        with pytest.raises(type(raised)), staged(tmp_path / "a" / "b") as folder:
            (folder / "half").write_text("half")
            raise raised
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_at_any_line_leaves_nothing_or_the_whole(tmp_path: Path) -> None:
    def export_files() -> None:
        with staged(tmp_path / "a" / "out") as folder:
            for name in ("one", "two"):
                (folder / name).write_text(name)

    for at in range(1, 1000):
        if not interrupted(at, export_files, publish, lease, durable):
            break
        if (tmp_path / "a" / "out").exists():
            assert sorted(file.name for file in (tmp_path / "a" / "out").iterdir()) == ["one", "two"]
            shutil.rmtree(tmp_path / "a")
        assert list(tmp_path.iterdir()) == [], f"line {at}"
    assert at > 50  # or no line was seen


def test_a_killed_export_leaves_no_folder_of_its_name_and_the_next_one_clears_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(out)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists() and (tmp_path / killed.stdout.strip()).is_dir()
    with staged(out) as folder:
        (folder / "whole").write_text("whole")
        with (
            pytest.raises(ShardtuneError),
            staged(out) as other,
        ):  # that of a living one stays: they do not share a folder
            assert folder.is_dir() and other != folder
            raise OSError("ends")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert [file.name for file in out.iterdir()] == ["whole"]


def test_of_two_exports_to_one_place_the_slower_one_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserInputError, match="has appeared"), staged(out), staged(out) as faster:
        (faster / "whole").write_text("whole")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "whole").is_file()


def test_a_file_that_cannot_be_read_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ShardtuneError) as failed, staged(tmp_path / "out"):
        (tmp_path / "base.safetensors").read_bytes()
    assert "base.safetensors" in failed.value.what and "Free disk space" not in failed.value.fix


def test_a_checkpoint_stays_while_it_is_exported(tmp_path: Path) -> None:
    """Its run goes on, and keeps the newest only; verification reads the adapter a second time."""
    tuned_toy("dense", tmp_path)
    run = tmp_path / "20260101-000000-abcd"
    run.mkdir()
    config = {"model": {"model_name_or_path": str(tmp_path / "base"), "torch_dtype": "float32"},
              "data": {"dataset_name_or_path": "rows.jsonl"}}  # fmt: skip
    (run / "config.yaml").write_text(json.dumps(config))
    (run / "run.json").write_text(json.dumps({"version": 1, "started": 1.0}))
    store = CheckpointStore(run / "checkpoints", keep=1)

    def save(step: int) -> None:
        store.write(step, lambda folder: shutil.copytree(tmp_path / "adapter", folder, dirs_exist_ok=True) and None, {})

    class Saving(Quiet):
        def say(self, label: str, text: str) -> None:
            super().say(label, text)
            save(1 + len(self.lines))

    save(1)
    tuned = find_tuned(str(run), checkpoint="1")
    export_model(ExportRequest(tuned, "merged", tmp_path / "out"), Saving())
    save(100)
    assert store.steps() == [100]  # nothing holds it any longer
    with pytest.raises(UserInputError, match="is gone"):
        export_model(ExportRequest(tuned, "merged", tmp_path / "again"), Quiet())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(toy: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 300) as disk:
        with pytest.raises(UserInputError, match="its disk has") as refused:
            export(toy / "adapter", disk / "out")
        assert "another disk" in refused.value.fix
        assert list(disk.iterdir()) == []


def test_a_disk_that_fills_leaves_nothing(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes the space after it was checked."""
    monkeypatch.setattr("shardtune.export.run.check_out", lambda *_, **__: None)
    with small_disk(tmp_path / "disk", 60) as disk:
        with pytest.raises(ShardtuneError, match="No space left") as failed:
            export(toy / "adapter", disk / "out")
        assert failed.value.exit_code == 1
        assert list(disk.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match="cannot be written"):
        export(toy / "adapter", tmp_path / "file" / "out")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(UserInputError, match="cannot be written"):
            export(toy / "adapter", tmp_path / "closed" / "out")


def test_everybody_may_read_what_was_written(toy: Path, tmp_path: Path) -> None:
    export(toy / "adapter", tmp_path / "out")
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "out").iterdir()} == {"0o644"}
    load_file(tmp_path / "out" / "model.safetensors")


def test_space_for_the_whole_export_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="TiB"):
        check_out(tmp_path / "out", 1 << 60)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(toy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardtune", "export", str(toy / "adapter"), "--to", "merged"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until = time.monotonic() + 120
    while not list(tmp_path.iterdir()) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert list(tmp_path.iterdir()) == []
