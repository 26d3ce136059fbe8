"""What a store promises: whole checkpoints or none, damage named, the best, the last and the read ones kept."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from interrupted_lines import interrupted
from small_disk import fill as fill_disk
from small_disk import free, small_disk

from shardtune import durable
from shardtune import lease as lease_module
from shardtune.checkpoint import store as store_module
from shardtune.checkpoint.store import CheckpointStore, publish
from shardtune.lease import Lease, is_held

FILES = ("adapter_model.safetensors", "adapter_config.json", "sub/more.txt")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # hundreds of real ones take half a minute


def fill(folder: Path) -> None:
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def write(store: CheckpointStore, step: int, eval_loss: float | None = None) -> Path:
    return store.write(step, fill, {"eval_loss": eval_loss})


def assert_all_complete(store: CheckpointStore) -> None:
    for step in store.steps():
        assert store.verify(step) == []
        for name in FILES:
            assert (store.path(step) / name).read_text() == f"content of {name}", f"{step}/{name}"


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


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


def test_a_full_disk_publishes_nothing_leaves_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)

    def fail(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space"):
        store.write(2, fail, {})
    assert store.steps() == [1] and leftovers(tmp_path) == []
    write(store, 2)
    assert_all_complete(store)
    assert store.steps() == [1, 2]


def test_a_disk_that_really_is_full_is_an_oserror_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    import torch

    from shardtune.checkpoint.adapter import write_tensors

    with small_disk(tmp_path / "disk", 1024) as disk:
        store = CheckpointStore(disk / "checkpoints", keep=2)
        for step, numbers in ((1, 1000), (2, 1_000_000), (3, 1000)):
            tensors = {"a": torch.ones(numbers)}
            try:
                store.write(step, lambda folder, t=tensors: write_tensors(folder / "a.safetensors", t), {})
            except OSError as error:
                assert step == 2 and error.errno == errno.ENOSPC
                assert leftovers(store.folder) == []
        assert store.steps() == [1, 3] and store.newest_intact() == (3, [])


def test_a_disk_that_fills_after_the_rename_costs_the_pointers_and_the_next_save_brings_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        store = CheckpointStore(disk / "checkpoints", keep=None)
        write(store, 1, 0.5)

        def publish_and_fill(folder: Path, fill: Callable[[Path], None]) -> Path:
            published = publish(folder, fill)
            fill_disk(disk)
            return published

        monkeypatch.setattr(store_module, "publish", publish_and_fill)
        assert write(store, 2, 0.25) == store.path(2)
        monkeypatch.undo()
        assert store.steps() == [1, 2] and store.verify(2) == []
        assert leftovers(store.folder) == []
        for pointer in ("latest", "best"):  # gone, or right; never to what may be deleted
            path = store.folder / pointer
            assert not path.exists() or path.read_text() == "step-000002\n"
        with pytest.raises(OSError, match="No space"):
            write(store, 3)
        assert leftovers(store.folder) == []
        free(disk)
        write(store, 3, 0.125)
        assert {(store.folder / name).read_text() for name in ("latest", "best")} == {"step-000003\n"}


def test_a_full_disk_does_not_keep_a_damaged_checkpoint_in_the_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        store = CheckpointStore(disk / "checkpoints", keep=None)
        for step in (1, 2):
            write(store, step)
        fill_disk(disk)
        store.set_aside(2)
        assert store.steps() == [1] and leftovers(store.folder) == []


def test_a_run_folder_that_is_gone_is_not_made_again_on_another_disk(tmp_path: Path) -> None:
    """Under a mount that was lost there is an empty folder of the root disk."""
    store = CheckpointStore(tmp_path / "mount" / "runs" / "one" / "checkpoints", keep=None)
    with pytest.raises(FileNotFoundError):
        write(store, 1)
    assert list(tmp_path.iterdir()) == []


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(5, 0))  # a terminal: opening it could wait or take it over
    except PermissionError:
        pytest.skip("making a device takes root")


def _link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("real"))
    path.symlink_to("real")


def _broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("kind", [_fifo, _device, _link_to_a_fifo, _broken_link, _folder])
@pytest.mark.parametrize("name", ["manifest.json", "adapter_model.safetensors", "sub/more.txt"])
@pytest.mark.parametrize("contents", [True, False])
def test_what_is_no_plain_file_is_damage_and_is_never_opened(
    tmp_path: Path, kind: Callable[[Path], None], name: str, contents: bool
) -> None:
    """In a process of its own with an end: opening a fifo waits for its other side, for ever."""
    store = CheckpointStore(tmp_path, keep=None)
    file = write(store, 1) / name
    file.unlink()
    kind(file)
    code = (
        "import sys; from pathlib import Path; from shardtune.checkpoint.store import CheckpointStore\n"
        f"store = CheckpointStore(Path(sys.argv[1]), keep=None); found = store.verify(1, contents={contents})\n"
        "print([str(d) for d in found if d.is_fatal]); print(store.best(), store.newest_intact()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"['{name}: not a plain file']", "None None"], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    ("locked", "said"),
    [
        ("step-000002", "['manifest.json: unreadable (Permission denied)'] 1"),
        (
            "step-000002/sub",
            "['sub/more.txt: unreadable (Permission denied)', 'sub: unreadable (Permission denied)'] 1",
        ),
        ("", "UnreadableStoreError"),
    ],
)
def test_what_may_not_be_read_is_damage_and_no_traceback(locked: str, said: str) -> None:
    with TemporaryDirectory() as temporary:  # pytest's own folders are closed to others
        Path(temporary).chmod(0o755)
        store = CheckpointStore(Path(temporary) / "checkpoints", keep=None)
        for step in (1, 2):
            write(store, step)
        (store.folder / locked).chmod(0)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.seteuid(65534)
            try:
                text = f"{[str(one) for one in store.verify(2) if one.is_fatal]} {store.newest_intact()[0]}"
            except BaseException as error:  # noqa: BLE001 - told to the test
                text = type(error).__name__
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            assert answer.read() == said
        os.waitpid(child, 0)


def test_links_and_files_with_the_name_of_a_checkpoint_are_listed_and_not_counted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    assert store.not_folders() == []
    write(store, 1)
    (tmp_path / "step-000002").symlink_to("step-000001")
    (tmp_path / "step-000003").write_text("a file")
    (tmp_path / "other").write_text("a file")
    assert store.steps() == [1]
    assert store.not_folders() == [tmp_path / "step-000002", tmp_path / "step-000003"]


def test_facts_that_cannot_be_written_publish_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(TypeError):
        store.write(1, fill, {"step": object()})
    assert store.steps() == []


def test_everything_reaches_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    monkeypatch.setattr(os, "rename", lambda a, b, **k: (order.append(f"rename {b}"), rename(a, b, **k))[1])
    folder = publish(tmp_path / "final", fill)
    staging = tmp_path / next(p.name for p in map(Path, order) if p.name.startswith(".staging-"))
    renamed = order.index(f"rename {folder}")
    assert {str(staging), *(str(staging / name) for name in FILES)} <= set(order[:renamed])
    assert order[renamed + 1 :] == [str(tmp_path)]


def test_ctrl_c_at_any_line_leaves_the_earlier_folder_or_the_new_one(tmp_path: Path) -> None:
    final = tmp_path / "final"
    publish(final, lambda folder: (folder / "old").write_text("old") and None)
    for at in range(1, 1000):
        if not interrupted(at, lambda: publish(final, fill), store_module, lease_module, durable):
            break
        if (final / "old").exists():
            left = [path.name for path in tmp_path.iterdir()]
            assert left == ["final"], f"line {at}: {left}"
        else:  # the old one may wait for its deletion
            assert sorted(str(file.relative_to(final)) for file in final.rglob("*") if file.is_file()) == sorted(FILES)
            publish(final, lambda folder: (folder / "old").write_text("old") and None)
            assert [path.name for path in tmp_path.iterdir()] == ["final"], f"line {at}"
    assert at > 50  # or no line was seen


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
        write(store, step, {2: 0.5, 8: 0.25}.get(step, 1.0))
        best = 1 if step < 2 else 2 if step < 8 else 8
        newest = list(range(max(1, step - keep + 1), step + 1))
        assert store.steps() == sorted({*newest, best})
        assert (tmp_path / "best").read_text() == f"step-{best:06d}\n"
        assert (tmp_path / "latest").read_text() == f"step-{step:06d}\n"
    assert_all_complete(store)


def test_a_loss_that_is_no_number_or_was_not_measured_is_never_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    for step, loss in ((1, None), (2, float("nan")), (3, float("-inf")), (4, 2.0), (5, 2.0)):
        write(store, step, loss)
        assert store.best() == (None if step < 4 else (4, 2.0))
        assert (tmp_path / "best").exists() == (step >= 4)


def test_a_loss_measured_later_makes_a_checkpoint_the_best_and_leaves_it_sound(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    write(store, 1)
    write(store, 2, eval_loss=0.5)
    store.record_eval(1, 0.25)
    assert store.best() == (1, 0.25)
    assert (tmp_path / "best").read_text().strip() == "step-000001"
    assert store.verify(1) == []
    assert (tmp_path / "step-000001" / "manifest.json").stat().st_mode & 0o777 == 0o644


def test_writing_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.write(1, lambda folder: (folder / "old").touch(), {})
    write(store, 1)
    assert not (store.path(1) / "old").exists()
    assert_all_complete(store)
    assert leftovers(tmp_path) == []


def spoil(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[:-1])
    elif kind == "longer":
        path.write_bytes(content + b" ")
    elif kind == "changed":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif kind == "not a plain file":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")


@pytest.mark.parametrize("kind", ["missing", "truncated", "longer", "changed", "not a plain file"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_with_its_damage_and_the_checkpoint_before_is_found(
    tmp_path: Path, name: str, kind: str
) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 2, 3):
        write(store, step)
    spoil(store.path(3) / name, kind)
    step, damaged = store.newest_intact()
    assert step == 2
    assert [(one.step, [(damage.file, damage.kind) for damage in one.damages]) for one in damaged] == [
        (3, [(name, kind)])
    ]
    assert name in str(damaged[0]) and kind in str(damaged[0])


@pytest.mark.parametrize("kind", ["missing", "truncated", "changed", "not a plain file"])
def test_a_damaged_manifest_is_noticed(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    write(store, 1)
    write(store, 2)
    manifest = store.path(2) / "manifest.json"
    if kind == "truncated":
        manifest.write_text(manifest.read_text()[:-10])
    elif kind == "changed":  # still JSON, and every file would fit
        manifest.write_text(manifest.read_text().replace('"eval_loss": null', '"eval_loss": 0.01'))
    else:
        spoil(manifest, kind)
    step, damaged = store.newest_intact()
    assert step == 1 and damaged[0].damages[0].file == "manifest.json"
    assert store.best() is None  # what it says counts for nothing


def test_every_single_flipped_bit_of_every_file_is_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    store.write(1, lambda folder: (folder / "a").write_bytes(b"tensor") and None, {"eval_loss": 1.0})
    for path in store.path(1).iterdir():
        content = path.read_bytes()
        for position in range(0, len(content), 7):
            flipped = bytearray(content)
            flipped[position] ^= 4
            path.write_bytes(flipped)
            if json.loads(content) == _json(flipped) if path.suffix == ".json" else False:
                continue  # a space that became another one says the same
            assert any(damage.is_fatal for damage in store.verify(1)), f"{path.name}, byte {position}"
        path.write_bytes(content)
    assert store.verify(1) == []


def _json(content: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(content)
    return None


def test_an_extra_file_is_told_but_spoils_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    write(store, 1)
    (store.path(1) / "notes.txt").touch()
    assert [str(damage) for damage in store.verify(1)] == ["notes.txt: extra"]
    assert store.newest_intact() == (1, [])


def test_a_checkpoint_under_another_ones_name_is_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    write(store, 1).rename(store.path(2))
    assert store.newest_intact()[0] is None
    assert store.verify(2)[0].kind == "wrong step"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "..", "a//b", ".hidden", "a\\b"])
def test_a_name_in_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    from shardtune.checkpoint import manifest

    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    write(store, 1)
    (tmp_path / "outside").write_text("secret")
    path = store.path(1) / "manifest.json"
    body = json.loads(path.read_text())
    del body["self"]
    body["files"][name] = {"size": 6, "sha256": "0" * 64}
    path.write_text(json.dumps({**body, "self": manifest._body_digest(body)}))
    assert "outside its folder" in str(store.verify(1)[0])
    with pytest.raises(manifest.ManifestError):
        manifest.read_manifest(store.path(1))


def test_a_folder_inside_a_checkpoint_that_links_elsewhere_is_not_followed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    write(store, 1)
    (store.path(1) / "sub").rename(tmp_path / "sub")
    (store.path(1) / "sub").symlink_to(tmp_path / "sub")
    assert ("sub/more.txt", "not a plain file") in [(d.file, d.kind) for d in store.verify(1)]


def test_a_damaged_checkpoint_set_aside_no_longer_counts_and_is_still_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    CheckpointStore(tmp_path, keep=None).write(9, fill, {})
    spoil(store.path(9) / FILES[0], "truncated")
    aside = store.set_aside(9)
    assert aside.is_dir() and store.steps() == [1]
    assert (tmp_path / "latest").read_text() == "step-000001\n"
    write(store, 2)  # the damaged one, of a later step, must not push it out
    assert store.steps() == [2]


def test_a_checkpoint_being_read_is_not_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    with store.reading(1) as folder:
        write(store, 2)
        assert (folder / FILES[0]).is_file()
        assert store.steps() == [1, 2]
    write(store, 3)
    assert store.steps() == [3] and leftovers(tmp_path) == []


def test_a_lease_dies_with_its_reader(tmp_path: Path, environment: dict[str, str]) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    program = (
        "import sys, time; from pathlib import Path; from shardtune.checkpoint.store import CheckpointStore\n"
        "with CheckpointStore(Path(sys.argv[1]), 1).reading(1): print('reading', flush=True); time.sleep(60)"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
        write(store, 2)
        assert store.steps() == [1, 2]
    finally:
        reader.kill()
        reader.wait()
    write(store, 3)
    assert store.steps() == [3] and leftovers(tmp_path) == []


def test_reading_what_is_gone_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(FileNotFoundError), store.reading(1):
        pass
    assert leftovers(tmp_path) == []


def test_what_a_living_process_is_writing_is_left_alone_and_a_dead_ones_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    dead, living = tmp_path / ".staging-step-000001-dead", tmp_path / ".staging-step-000001-alive"
    for staging in (dead, living):
        staging.mkdir()
        (staging / "half").touch()
    (tmp_path / ".staging-step-000001-dead.owner").touch()  # its lock went with its process
    lease = Lease.take(tmp_path / ".staging-step-000001-alive.owner")
    assert lease is not None
    write(store, 2)
    assert not dead.exists() and living.exists()
    lease.release()
    write(store, 3)
    assert leftovers(tmp_path) == []


def test_a_lease_is_held_by_one_and_an_orphans_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    path.write_text("of a process that is gone")
    assert not is_held(path)
    first = Lease.take(path)
    assert first is not None and is_held(path)
    assert Lease.take(path) is None
    first.release()
    assert not path.exists() and not is_held(path)


@contextmanager
def without_locks() -> Iterator[None]:
    """A mount that knows no flock."""
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        yield


@pytest.mark.parametrize(
    ("says", "held"),
    [
        (lambda: {"host": os.uname().nodename, "pid": os.getppid(), "started": _started(os.getppid())}, True),
        (lambda: {"host": os.uname().nodename, "pid": os.getppid(), "started": "1"}, False),  # the number, given again
        (lambda: {"host": os.uname().nodename, "pid": 2**22 + 1, "started": None}, False),
        (lambda: {"host": "elsewhere", "pid": 1, "started": "1"}, True),
        (lambda: "nonsense", False),
    ],
)
def test_where_nothing_can_be_locked_the_owner_is_looked_up(
    tmp_path: Path, says: Callable[[], Any], held: bool
) -> None:
    path = tmp_path / "lease"
    path.write_text(json.dumps(says()))
    with without_locks():
        assert is_held(path) == held
        os.utime(path, (0, 0))
        assert is_held(path) == (held and says()["host"] != "elsewhere")


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_files_are_readable_by_others_whatever_wrote_them(tmp_path: Path) -> None:
    def private(folder: Path) -> None:
        (folder / "a").touch(mode=0o600)

    store = CheckpointStore(tmp_path, keep=None)
    folder = store.write(1, private, {})
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {
        "a": "0o644",
        "manifest.json": "0o644",
    }


def test_publishing_beside_other_files_leaves_them_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    write(CheckpointStore(tmp_path / "checkpoints", keep=1), 1)
    publish(tmp_path / "final", fill)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "config.yaml", "final"]


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "file"])
def test_somebodys_link_or_file_at_the_name_of_a_new_checkpoint_is_moved_aside(tmp_path: Path, kind: str) -> None:
    """Otherwise that checkpoint, and every one after it, could not be written."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "kept").write_text("kept")
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    store.write(10, lambda folder: (folder / "a").write_text("a") and None, {})
    if kind == "file":
        store.path(20).write_text("mine")
    else:
        store.path(20).symlink_to(precious if kind == "link to a folder" else tmp_path / "nowhere")
    for step in (20, 30):
        store.write(step, lambda folder: (folder / "a").write_text("a") and None, {})
    assert store.steps() == [10, 20, 30] and store.newest_intact() == (30, [])
    assert store.verify(20) == []
    (aside,) = store.folder.glob("displaced-step-000020-*")
    assert aside.read_text() == "mine" if kind == "file" else aside.is_symlink()
    assert (precious / "kept").read_text() == "kept"
    assert [path.name for path in store.folder.iterdir() if path.name.startswith(".staging")] == []
