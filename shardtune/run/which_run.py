"""Which run does this command mean: a new one, or one to resume? Decided once, before any process is started."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.checkpoint.changes import changes, identity, kept_settings
from shardtune.checkpoint.manifest import NAME as MANIFEST
from shardtune.checkpoint.manifest import TRAINER, ManifestError, read_manifest, verify
from shardtune.checkpoint.store import CheckpointStore, UnreadableStoreError, publish
from shardtune.config.batch import effective_batch
from shardtune.config.schema import RunConfig
from shardtune.durable import read_plain, replace_file
from shardtune.errors import UserInputError
from shardtune.run.base_model import kept_base
from shardtune.run.folder import (
    CHECKPOINTS,
    RECORD,
    SCRIPT,
    ForeignFolderError,
    RunFolder,
    check_run_id,
    create_run_folder,
    hold_run_folder,
    not_writable,
)


@dataclass(frozen=True)
class Run:
    """A run as its folder describes it. `notice`: what is wrong with that description, for the user."""

    folder: Path
    identity: str
    settings: dict[str, Any]
    started: float
    finished: bool
    notice: str = ""

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.folder / CHECKPOINTS, keep=None)


@dataclass(frozen=True)
class ChosenRun:
    """The folder to write to, leased by this process, and a notice for the user about the choice."""

    run_folder: RunFolder
    notice: str = ""

    @property
    def folder(self) -> Path:
        return self.run_folder.path

    @property
    def created(self) -> bool:
        return self.run_folder.created


def choose_run(config: RunConfig, run_id: str | None, processes: int | None = None) -> ChosenRun:
    """The run that `train.resume` and `--run-id` select; this process holds the lease of its folder from here on.

    - `never`: a new one.
    - `auto`: the newest unfinished run with a checkpoint and the same config (all settings that affect its numbers,
      except its length); else a new one. With --run-id: that run, if it has the same config and is unfinished.
    - `latest`: the newest run that has a checkpoint, finished or not; of the same config if there is one.
    - `best`, or a path: the run resumes in its own folder if that is its newest checkpoint and it is not finished.
      Otherwise a new run starts from a copy of the checkpoint, so that nothing of the old run is overwritten.

    Args:
        processes: Number on all machines together, if known: it determines the rows per step.

    Raises:
        UserInputError: there is nothing to resume, or the named run has another config.
    """
    if run_id is not None:
        check_run_id(run_id)
    wanted = config.train.resume
    if wanted == "never":
        return _new(config, run_id)
    if wanted == "auto":
        return _auto(config, run_id, processes)
    if wanted == "latest":
        return _existing(config, _latest(config, run_id))
    if wanted == "best":
        return _from_best(config, run_id)
    return _from_path(config, run_id, Path(wanted).expanduser().absolute())


def record_start(folder: Path, config: RunConfig) -> None:
    """Record the config of this run, so that the same config finds it again. Also reopens a finished run."""
    _write_record(folder, config, started=time.time(), finished=False)


def record_finish(folder: Path, config: RunConfig) -> None:
    """Mark the run as finished: from here on `auto` starts a new run."""
    run = read_run(folder)  # its record may have been lost while it trained
    _write_record(folder, config, started=run.started if run is not None else time.time(), finished=True)


def read_run(folder: Path) -> Run | None:
    """The run in `folder`, or None. If its record is damaged, it is reconstructed from its checkpoints."""
    try:
        record = json.loads(read_plain(folder / RECORD))
        if record.get("kind") == SCRIPT:
            return None  # not of `train`
        return Run(
            folder,
            str(record["identity"]),
            dict(record["settings"]),
            float(record["started"]),
            bool(record["finished"]),
        )
    except FileNotFoundError:
        problem = "is missing"
    except OSError as error:
        problem = f"cannot be read ({error.strerror or 'not a plain file'})"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "is damaged"
    return _run_of_checkpoints(folder, problem)


def is_finished(folder: Path) -> bool:
    """Whether a run of `train` came to its end, as its record says; False where that is lost."""
    try:
        record = json.loads(read_plain(folder / RECORD))
        return bool(record["finished"]) and record.get("kind") != SCRIPT
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_final_again(folder: Path) -> str:
    """What to do where a finished run has lost its `final/`."""
    return (
        f"To write it again: shardtune train {folder / 'config.yaml'} --resume {folder} (started in the same folder "
        "and on as many processes as the training). It goes on from the newest checkpoint, and takes no step if that "
        "is the last one."
    )


def _run_of_checkpoints(folder: Path, problem: str) -> Run | None:
    """The run as its newest readable checkpoint describes it: `trainer.json` repeats what `run.json` says."""
    store = CheckpointStore(folder / CHECKPOINTS, keep=None)
    try:
        steps = store.steps()
    except UnreadableStoreError:  # another user's, or `_unreadable_folders` says so
        return None
    for step in reversed(steps):
        manifest = store.manifest(step)
        if manifest is None or any(damage.is_fatal for damage in store.verify(step)):
            continue
        saved = json.loads((store.path(step) / TRAINER).read_text(encoding="utf-8"))
        asked = saved.get("asked") or saved  # older ones have only the resolved settings
        notice = f"{RECORD} of the run {folder.name} {problem}; restored from its checkpoint of step {step}"
        saved_at = float(manifest.about.get("time") or 0.0)
        return Run(folder, asked["identity"], asked["settings"], saved_at, _final_after(folder, saved_at), notice)
    return None


def _final_after(folder: Path, saved_at: float) -> bool:
    """Whether `final/` is newer than the last checkpoint; an older one belongs to a run that was then extended."""
    try:
        return (folder / "final").stat().st_mtime >= saved_at
    except OSError:
        return False


def _write_record(folder: Path, config: RunConfig, *, started: float, finished: bool) -> None:
    about = {"identity": identity(config), "settings": kept_settings(config), "started": started, "finished": finished}
    replace_file(folder / RECORD, json.dumps({"format": 1, **about, **kept_base(folder)}, indent=1) + "\n")


def _new(config: RunConfig, run_id: str | None, notice: str = "") -> ChosenRun:
    run_folder = create_run_folder(config.train.output_dir, run_id, config.train.run_folder_access)
    try:
        record_start(run_folder.path, config)
    except OSError as error:  # on a full disk a folder can be created, but no file with content
        run_folder.discard_untrained()
        run_folder.lease.release()
        raise not_writable(run_folder.path, error) from error
    return ChosenRun(run_folder, notice)


def _existing(config: RunConfig, run: Run, notice: str = "") -> ChosenRun:
    run_folder = hold_run_folder(run.folder, config.train.run_folder_access)
    now = read_run(run.folder)
    if now is not None and now.finished and not run.finished:  # by another process that held it until now
        run_folder.lease.release()
        raise UserInputError(
            f"The run '{run.folder.name}' was just finished by another process: {run.folder}",
            fix="Start again for a new run, with another --run-id if you gave one.",
        )
    notices = [run.notice, notice]
    if not run.store.steps():  # otherwise they are reported where the run resumes
        notices += [f"{path} is a link or a file, not a checkpoint folder: ignored" for path in run.store.not_folders()]
    return ChosenRun(run_folder, "\n".join(filter(None, notices)))


def _auto(config: RunConfig, run_id: str | None, processes: int | None) -> ChosenRun:
    mine = identity(config)
    if run_id is not None:
        run = read_run(_output(config) / run_id)
        if run is None:
            return _new(config, run_id)
        if run.identity != mine or run.finished:
            differences = compare(run, config, processes)
            why = "It is finished." if run.identity == mine else f"Its config differs:\n{differences}"
            fix = "Choose another --run-id"
            raise UserInputError(
                f"The run '{run_id}' already exists: {run.folder}",
                why=why,
                fix=f"{fix}, or resume it: --resume latest." if differences.may_resume else f"{fix}.",
            )
        return _existing(config, run)
    runs = _runs(config)
    same = [run for run in runs if run.identity == mine]
    lost = "".join(f"{line}\n" for line in _unreadable_folders(config))
    for run in same:
        if not run.finished and run.store.steps():
            try:
                return _existing(config, run, f"{lost}resuming the unfinished run {run.folder.name}")
            except ForeignFolderError as error:
                lost += f"{error.what} It is skipped.\n"
    notice = ""
    if same and same[0].finished:
        notice = f"starting a new run: the run of this config, {same[0].folder.name}, is finished"
    elif near := next((run for run in runs if not run.finished and _may_resume(run)), None):
        differences = compare(near, config, processes)
        how = f" (to resume it: --run-id {near.folder.name} --resume latest)" if differences.may_resume else ""
        notice = f"starting a new run: the config of the unfinished run {near.folder.name} differs{how}:\n{differences}"
    return _new(config, run_id, f"{lost}{notice}".rstrip())


def _may_resume(run: Run) -> bool:
    try:
        return bool(run.store.steps())
    except UnreadableStoreError:
        return False


def _unreadable_folders(config: RunConfig) -> list[str]:
    """This user's folders with checkpoints but no readable record: never skipped silently."""
    found = []
    for path in _folders(config):
        if path.stat().st_uid == os.geteuid() and (path / CHECKPOINTS).exists() and read_run(path) is None:
            found.append(
                f"{path} has checkpoints, but neither its {RECORD} nor any of them can be read: skipped and left "
                "unchanged (shardtune checkpoints --verify shows what is wrong)"
            )
    return found


def _latest(config: RunConfig, run_id: str | None) -> Run:
    if run_id is not None:
        run = read_run(_output(config) / run_id)
        if run is None or not run.store.steps():
            raise UserInputError(
                f"--resume {config.train.resume}: the run '{run_id}' has no checkpoint.",
                why=f"Looked in {_output(config) / run_id}.",
                fix="Give another --run-id, or use --resume auto.",
            )
        return run
    runs = [run for run in _runs(config) if run.store.steps()]
    if not runs:
        raise UserInputError(
            f"--resume {config.train.resume}: there is no run with a checkpoint.",
            why=f"Looked in {_output(config)} (train.output_dir).",
            fix="Set train.output_dir to where the run is, give the checkpoint's path, or use --resume auto.",
        )
    mine = identity(config)
    return next((run for run in runs if run.identity == mine), runs[0])


def _from_best(config: RunConfig, run_id: str | None) -> ChosenRun:
    run = _latest(config, run_id)
    best = run.store.best()
    if best is None:
        raise UserInputError(
            f"--resume best: no checkpoint of the run {run.folder.name} has an evaluation loss.",
            fix="Use --resume latest, or a checkpoint's path.",
        )
    return _resume_or_fork(config, None, run, run.store.path(best[0]), best[0])


def _from_path(config: RunConfig, run_id: str | None, path: Path) -> ChosenRun:
    run = read_run(path)
    if run is not None:
        if not run.store.steps():
            raise UserInputError(f"--resume: the run {path} has no checkpoint.", fix="Use --resume never.")
        return _existing(config, run)
    if not (path / MANIFEST).is_file():
        raise UserInputError(
            f"--resume: '{path}' is neither a checkpoint nor a run.",
            why="A checkpoint contains a manifest.json, a run a run.json.",
            fix="Give auto, latest, best, never, or the path of a checkpoint (…/checkpoints/step-000200).",
        )
    try:
        step = read_manifest(path).step
    except ManifestError as error:
        raise _corrupt(path, [str(error.damage)]) from error
    return _resume_or_fork(config, run_id, read_run(path.parent.parent), path, step)


def _resume_or_fork(config: RunConfig, run_id: str | None, run: Run | None, path: Path, step: int) -> ChosenRun:
    damages = [str(damage) for damage in verify(path) if damage.is_fatal]
    if damages:
        raise _corrupt(path, damages)
    same_name = run is not None and run_id in (None, run.folder.name)
    if run is not None and same_name and not run.finished and run.store.steps()[-1:] == [step]:
        return _existing(config, run)
    begun = _new(config, run_id, f"starting a new run from a copy of {path}")
    target = CheckpointStore(begun.folder / CHECKPOINTS, keep=None)
    _copy(path, target.path(step))
    best = _best_until(path.parent, step)
    if best is not None and best != step:
        _copy(path.parent / target.path(best).name, target.path(best))
    return begun


def _best_until(folder: Path, step: int) -> int | None:
    """The best checkpoint of the old run up to that step, which the new run keeps."""
    store = CheckpointStore(folder, keep=None)
    losses = [
        (manifest.eval_loss, earlier)
        for earlier in store.steps()
        if earlier <= step and (manifest := store.manifest(earlier)) is not None and manifest.eval_loss is not None
    ]
    sound = (at for _, at in sorted(losses) if not any(damage.is_fatal for damage in store.verify(at)))
    return next(sound, None)


def _copy(source: Path, target: Path) -> None:
    def fill(folder: Path) -> None:
        for name in (*read_manifest(source).files, MANIFEST):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)

    publish(target, fill)


def _corrupt(path: Path, damages: list[str]) -> UserInputError:
    return UserInputError(
        f"--resume: the checkpoint {path} is damaged.",
        why="; ".join(damages),
        fix="Give another one: `shardtune checkpoints RUN --verify` shows which are intact; --resume latest uses the "
        "newest of them.",
    )


def _runs(config: RunConfig) -> list[Run]:
    """Runs in the output folder, newest first."""
    found = [run for path in _folders(config) if (run := read_run(path)) is not None]
    return sorted(found, key=lambda run: (run.started, run.folder.name), reverse=True)


def _folders(config: RunConfig) -> list[Path]:
    try:
        return sorted(path for path in _output(config).iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserInputError(
            f"Cannot read train.output_dir '{_output(config)}'.",
            why=f"{error.strerror} (as user {os.geteuid()}).",
            fix="Set train.output_dir to a folder you can read and write, or start a new run: --resume never.",
        ) from error


def _output(config: RunConfig) -> Path:
    return Path(config.train.output_dir).expanduser().absolute()


@dataclass(frozen=True)
class Differences:
    """Between a run and a config, a line each; `may_resume`: it has a checkpoint, and all of them are allowed."""

    lines: tuple[str, ...]
    may_resume: bool

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in self.lines) or "  settings unknown to this version"


def compare(run: Run, config: RunConfig, processes: int | None) -> Differences:
    """What differs, as far as it is known before the data is read."""
    found = changes(run.settings, kept_settings(config))
    lines, refused = [str(change) for change in found], any(change.verdict.kind == "refused" for change in found)
    step, trained = _last_saved(run)
    rows = trained.get("batch", {}).get("effective")
    train = config.train
    if processes is not None and rows is not None:
        mine = effective_batch(train, processes)
        if mine != rows:
            lines.append(f"rows per step: {rows} → {mine} (per device × processes × accumulation; must stay the same)")
            refused = True
    if 0 < train.max_steps < step:
        lines.append(f"train.max_steps: {train.max_steps} is below step {step}, which the run has reached")
        refused = True
    return Differences(tuple(lines), step > 0 and not refused)


def _last_saved(run: Run) -> tuple[int, dict[str, Any]]:
    """The step of the newest checkpoint, 0 where there is none, and its `trainer.json` if that can be read."""
    if not _may_resume(run):
        return 0, {}
    step = run.store.steps()[-1]
    try:
        return step, dict(json.loads(read_plain(run.store.path(step) / TRAINER)))
    except (OSError, ValueError, TypeError):
        return step, {}
