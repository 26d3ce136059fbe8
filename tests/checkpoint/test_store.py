from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shardtune.checkpoint.store import CheckpointStore, publish

FILES = ("adapter_model.safetensors", "adapter_config.json", "sub/more.txt")


class Crash(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches a power cut."""


def fill(folder: Path) -> None:
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def write(store: CheckpointStore, step: int, best: int | None = None) -> Path:
    return store.write(step, fill, {"step": step}, best)


def assert_all_complete(store: CheckpointStore) -> None:
    for step in store.steps():
        folder = store.path(step)
        assert json.loads((folder / "state.json").read_text()) == {"step": step}
        for name in FILES:
            assert (folder / name).read_text() == f"content of {name}", f"{folder.name}/{name}"


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@contextmanager
def crash_at(operation: int) -> Iterator[Callable[[], bool]]:
    """Cut the power before the n-th change to the disk (of those Python does through `os`)."""
    done = 0

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done >= operation:
                raise Crash
            return function(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", wrap(lambda fd: None))
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, wrap(getattr(os, name)))
        yield lambda: done >= operation


def test_a_checkpoint_holds_what_was_filled_in_and_its_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    assert store.steps() == []
    path = write(store, 25)
    assert path == store.path(25) == tmp_path / "checkpoints" / "step-000025"
    assert store.steps() == [25]
    assert_all_complete(store)
    assert leftovers(store.folder) == []


def test_steps_are_sorted_as_numbers_and_strangers_are_not_counted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1_000_000, 9, 100):
        write(store, step)
    (tmp_path / "step-000007").write_text("a file")
    for name in ("step-x", ".staging-step-000008", "step-000008.old", "other"):
        (tmp_path / name).mkdir()
    assert store.steps() == [9, 100, 1_000_000]


def test_a_crash_before_any_change_to_the_disk_leaves_only_complete_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the store holds three checkpoints, writes the last again or a fourth, and must drop the oldest."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of real ones take seconds
    for step in (2, 3):
        for operation in range(1, 200):
            store = CheckpointStore(tmp_path / f"{step}-{operation}", keep=2)
            for earlier in (0, 1, 2):
                write(CheckpointStore(store.folder, keep=None), earlier)
            with crash_at(operation) as happened, suppress(Crash):
                write(store, step)
            assert_all_complete(store)
            assert step - 1 in store.steps(), "what is to be kept is never lost"
            if not happened():
                assert operation > 15  # or nothing was counted
                break
            write(store, 4)  # the next run of the same folder
            assert_all_complete(store)
            assert leftovers(store.folder) == []
            assert store.steps()[-1] == 4
            assert len(store.steps()) == 2
        else:
            pytest.fail("never got to the end")


def test_a_fill_that_fails_publishes_nothing_and_the_next_write_cleans_up(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)

    def fail(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.write(2, fail, {}, None)
    assert store.steps() == [1]
    write(store, 2)
    assert_all_complete(store)
    assert leftovers(tmp_path) == []


def test_a_state_that_cannot_be_written_publishes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(TypeError):
        store.write(1, fill, {"step": object()}, None)
    assert store.steps() == []


def test_everything_reaches_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    monkeypatch.setattr(os, "rename", lambda a, b, **k: (order.append(f"rename {b}"), rename(a, b, **k))[1])
    folder = publish(tmp_path / "final", fill)
    staging = tmp_path / ".staging-final"
    renamed = order.index(f"rename {folder}")
    assert {str(staging), *(str(staging / name) for name in FILES)} <= set(order[:renamed])
    assert order[renamed + 1 :] == [str(tmp_path)]


def test_the_newest_few_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        write(store, step)
    assert store.steps() == [4, 5]
    assert_all_complete(store)


def test_without_a_limit_all_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    for step in range(1, 6):
        write(store, step)
    assert store.steps() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_best_is_never_deleted_and_goes_once_it_is_no_longer_the_best(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(1, 10):
        best = 2 if step < 8 else 8
        write(store, step, best if step >= best else None)
        newest = list(range(max(1, step - keep + 1), step + 1))
        assert store.steps() == sorted({*newest, *([best] if step >= best else [])})
    assert_all_complete(store)


def test_writing_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.write(1, lambda folder: (folder / "old").touch(), {}, None)
    write(store, 1)
    assert not (store.path(1) / "old").exists()
    assert_all_complete(store)
    assert leftovers(tmp_path) == []


def test_publishing_beside_other_files_leaves_them_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    write(CheckpointStore(tmp_path / "checkpoints", keep=1), 1)
    publish(tmp_path / "final", fill)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "config.yaml", "final"]
