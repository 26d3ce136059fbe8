"""Run by test_crash_points.py: a save is killed before each of its file-system calls in turn, and judged each time.

So is making `final/` another checkpoint's.

Forks one child per call. Nothing here has threads or imports torch, so that a fork is a few milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtune.checkpoint.final import FINAL, FinalSource, read_source, replace_final, write_source
from shardtune.checkpoint.store import BEST, LATEST, CheckpointStore

WEIGHTS = "adapter_model.safetensors"
# What Python tells an audit hook about; writes and syncs it does not, so those are wrapped.
AUDITED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.link", "os.symlink",
           "os.scandir", "os.listdir", "shutil.rmtree", "fcntl.flock"}  # fmt: skip
WRAPPED = ("write", "fsync", "fdatasync", "ftruncate", "close")


class Killer:
    """Ends this process with SIGKILL before the n-th call."""

    def __init__(self, at: int, only_under: Path) -> None:
        self.at, self.only_under, self.count = at, str(only_under), 0
        sys.addaudithook(self._audit)
        for name in WRAPPED:
            setattr(os, name, self._counted(getattr(os, name)))

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in AUDITED and (event == "fcntl.flock" or any(self.only_under in str(arg) for arg in args)):
            self._call()

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._call()
            return function(*args)

        return counted

    def _call(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def fill(step: int) -> Callable[[Path], None]:
    """Two files, each written in pieces: a kill between them leaves half a file."""

    def write(folder: Path) -> None:
        for name in ("adapter_model.safetensors", "trainer.json"):
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
            for piece in range(3):
                os.write(handle, f"{name} of step {step}, piece {piece}\n".encode() * 40)
            os.close(handle)

    return write


def save(folder: Path, step: int, eval_loss: float, keep: int | None) -> None:
    CheckpointStore(folder, keep).write(step, fill(step), {"eval_loss": eval_loss})


def judge(folder: Path, case: str, must_have: set[int]) -> None:
    """What is visible is whole, what had to stay is there, pointers point at something, the next save works."""
    store = CheckpointStore(folder, keep=None)
    for step in store.steps():
        assert store.verify(step) == [], f"{case}: step {step}: {store.verify(step)}"
    assert must_have <= set(store.steps()), f"{case}: {store.steps()}"
    for pointer in (LATEST, BEST):
        if (folder / pointer).exists():
            assert (folder / (folder / pointer).read_text().strip()).is_dir(), f"{case}: {pointer} points to nothing"
    assert store.newest_intact() == (store.steps()[-1], []), case
    newest = store.steps()[-1]
    save(folder, 40, eval_loss=9.0, keep=2)
    assert store.steps() == [10, newest, 40], f"{case}: {store.steps()}"
    assert (folder / LATEST).read_text() == "step-000040\n", case
    assert (folder / BEST).read_text() == "step-000010\n", case
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert hidden == [], f"{case}: {hidden}"


def judge_final(run: Path, case: str) -> str:
    """`final/` is that of step 10 or of step 20, whole; or it is not there, and the next call has the one it was."""
    final, store = run / FINAL, CheckpointStore(run / "checkpoints", keep=None)
    found = read_source(final)
    if final.exists():
        assert found is not None and found.step in (10, 20), f"{case}: {found}"
        assert (final / WEIGHTS).read_bytes() == (store.path(found.step) / WEIGHTS).read_bytes(), case
        assert (final / "tokenizer.json").read_text() == "tokens", case
    replace_final(run, store, FinalSource(20))
    assert (final / WEIGHTS).read_bytes() == (store.path(20) / WEIGHTS).read_bytes(), case
    assert (final / "tokenizer.json").read_text() == "tokens", case
    hidden = [path.name for path in run.iterdir() if path.name.startswith(".")]
    assert hidden == [], f"{case}: {hidden}"
    return str(found.step) if found else "absent"


def replace_finals(root: Path) -> None:
    seen = set()
    for at in range(1, 2000):
        run = root / f"final-{at}"
        store = CheckpointStore(run / "checkpoints", keep=None)
        run.mkdir()
        for step in (10, 20):
            store.write(step, fill_adapter(step), {"eval_loss": 1.0})
        (run / FINAL).mkdir()
        fill_adapter(10)(run / FINAL)
        (run / FINAL / "tokenizer.json").write_text("tokens")
        write_source(run / FINAL, FinalSource(10))
        child = os.fork()
        if child == 0:
            Killer(at, run)
            replace_final(run, store, FinalSource(20))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        seen.add(judge_final(run, f"final, call {at}"))
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, f"final, call {at}: it failed"
            break
    assert seen == {"10", "absent", "20"}, seen  # every kind of moment was met
    print("final", at - 1)


def fill_adapter(step: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        fill(step)(folder)
        (folder / "adapter_config.json").write_text("{}")

    return write


def saves(root: Path) -> None:
    # A new step, where the last one has to go and the best stays; and the newest step saved again.
    for case, step, must_have in (("new", 30, {10}), ("again", 30, {10, 20})):
        for at in range(1, 2000):
            folder = root / f"{case}-{at}"
            save(folder, 10, eval_loss=1.0, keep=None)
            save(folder, 20, eval_loss=2.0, keep=None)
            if case == "again":
                save(folder, 30, eval_loss=3.0, keep=None)
            child = os.fork()
            if child == 0:
                Killer(at, folder)
                save(folder, step, eval_loss=1.5, keep=1 if case == "new" else None)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            judge(folder, f"{case}, call {at}", must_have)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0, f"{case}, call {at}: the save failed"
                break
        print(case, at - 1)


if __name__ == "__main__":
    os.fsync = lambda handle: None  # type: ignore[assignment]  # still counted; hundreds of real ones take half a minute
    {"saves": saves, "final": replace_finals}[sys.argv[1]](Path(sys.argv[2]))
