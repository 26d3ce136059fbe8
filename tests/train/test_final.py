"""Where the finished adapter goes when its own disk has no room, on real small disks."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import fill, free, small_disk

from shardtune.errors import ShardtuneError
from shardtune.train.final import Publishing


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run on a full disk."""
    with small_disk(tmp_path / "disk", 256) as disk:
        (disk / "one").mkdir()
        fill(disk)
        yield disk / "one"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


class Told:
    """Publishes, and remembers what was said."""

    def __init__(self, run: Path, fallback: Path | None = None, wait: float = 0.0) -> None:
        self.said: list[str] = []
        self.beats = 0
        self.stop = threading.Event()
        self.publishing = Publishing(run, fallback, wait, self.said.append, self.stop.is_set, self._beat)

    def _beat(self) -> None:
        self.beats += 1

    def __call__(self) -> Path:
        where = self.publishing.publish(lambda folder: (folder / "adapter").write_bytes(b"x" * 50_000) and None)
        assert (where / "adapter").stat().st_size == 50_000
        return where


def test_with_room_it_is_in_the_run_and_nothing_is_said(tmp_path: Path) -> None:
    told = Told(tmp_path)
    assert told() == tmp_path / "final" and told.said == []


def test_the_fallback_is_taken_at_once(run: Path, tmp_path: Path) -> None:
    told = Told(run, tmp_path / "not" / "there", wait=600)
    assert told() == tmp_path / "not" / "there" / "one" / "final"
    assert told.beats == 0 and len(told.said) == 1
    assert "No space left on device" in told.said[0] and "The adapter is in" in told.said[0]


def test_it_waits_for_room_in_either_place_and_the_rank_counts_as_alive(run: Path) -> None:
    told = Told(run, run.parent / "same-disk", wait=600)
    threading.Timer(0.5, free, [run.parent]).start()
    assert told() == run / "final"
    assert told.beats > 0 and len(told.said) == 1 and "Waiting up to 10 minutes" in told.said[0]
    assert not list(run.glob(".*"))


def test_a_stop_ends_the_wait_and_the_adapter_is_in_tmpdir(run: Path, temporary: Path) -> None:
    told = Told(run, wait=600)
    threading.Timer(0.5, told.stop.set).start()
    where = told()
    assert where.parent.parent == temporary and where.parent.name.startswith("shardtune-one-")
    assert "Waiting" in told.said[0] and f"The adapter is in {where}" in told.said[1]


def test_without_room_anywhere_every_place_is_named_and_nothing_is_left(run: Path, temporary: Path) -> None:
    with small_disk(temporary, 64):
        fill(temporary)
        with pytest.raises(ShardtuneError) as failure:
            Told(run)()
        assert [path.name for path in temporary.iterdir()] == ["filler"]
    for place in (run, temporary):
        assert f"{place}: No space left on device" in failure.value.why
    assert list(run.iterdir()) == []


def test_the_folder_of_a_lost_mount_is_not_made_again(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "mount").mkdir()
    where = Told(tmp_path / "mount" / "one")()
    assert where.parent.parent == temporary
    assert list((tmp_path / "mount").iterdir()) == []
