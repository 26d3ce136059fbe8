"""Which run does this command mean: a new one, or one to go on with? Decided once, before any process is started."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.checkpoint.changes import changes, identity, kept_settings
from shardtune.checkpoint.manifest import NAME as MANIFEST
from shardtune.checkpoint.manifest import ManifestError, read_manifest, verify
from shardtune.checkpoint.store import CheckpointStore, publish
from shardtune.config.schema import RunConfig
from shardtune.durable import replace_file
from shardtune.errors import UserInputError
from shardtune.launch.run_folder import check_run_id, create_run_folder

RECORD = "run.json"
LEASE = ".run.lease"  # held by rank 0 while the run is alive
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    folder: Path
    identity: str
    settings: dict[str, Any]
    started: float
    finished: bool

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.folder / CHECKPOINTS, keep=None)


@dataclass(frozen=True)
class Choice:
    """The folder to write to, whether it was made just now, and what the user should know about that."""

    folder: Path
    created: bool
    told: str = ""


def choose_run(config: RunConfig, run_id: str | None) -> Choice:
    """The run that `train.resume` and `--run-id` mean.

    - `never`: a new one.
    - `auto`: the newest unfinished run of the same config (every setting that changes its numbers but its length) that
      has a checkpoint; else a new one. With --run-id: that run, if it is the same config and unfinished.
    - `latest`: the newest run that has a checkpoint, finished or not, of the same config if there is one.
    - `best`, or a path: the run goes on in its own folder where that is its newest checkpoint and it is not finished.
      Otherwise a new run begins with a copy of the checkpoint: what the old one did after it is not overwritten.

    Raises:
        UserInputError: nothing is there to go on with, or the run named is another one.
    """
    if run_id is not None:
        check_run_id(run_id)
    wanted = config.train.resume
    if wanted == "never":
        return _new(config, run_id)
    if wanted == "auto":
        return _auto(config, run_id)
    if wanted == "latest":
        return Choice(_latest(config, run_id).folder, created=False)
    if wanted == "best":
        return _from_best(config, run_id)
    return _from_path(config, run_id, Path(wanted).expanduser().absolute())


def record_start(folder: Path, config: RunConfig) -> None:
    """Write down which config this run is of, so that the same one finds it again. Also opens a finished one again."""
    settings = kept_settings(config)
    _write_record(
        folder, {"identity": identity(config), "settings": settings, "started": time.time(), "finished": False}
    )


def record_finish(folder: Path) -> None:
    """From here on `auto` starts a new run."""
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    _write_record(folder, {**record, "finished": True})


def read_run(folder: Path) -> Run | None:
    """The run in `folder`, or None if there is none that can be read."""
    try:
        said = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return Run(
            folder, str(said["identity"]), dict(said["settings"]), float(said["started"]), bool(said["finished"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    replace_file(folder / RECORD, json.dumps({"format": 1, **record}, indent=1) + "\n")


def _new(config: RunConfig, run_id: str | None, told: str = "") -> Choice:
    folder = create_run_folder(config.train.output_dir, run_id)
    record_start(folder, config)
    return Choice(folder, created=True, told=told)


def _auto(config: RunConfig, run_id: str | None) -> Choice:
    settings = kept_settings(config)
    mine = identity(config)
    if run_id is not None:
        run = read_run(_output(config) / run_id)
        if run is None:
            return _new(config, run_id)
        if run.identity != mine or run.finished:
            why = "It is finished." if run.finished else "It has another config:\n" + _differences(run, settings)
            raise UserInputError(
                f"The run '{run_id}' exists already: {run.folder}",
                why=why,
                fix="Choose another --run-id, or go on with it: --resume latest.",
            )
        return Choice(run.folder, created=False)
    runs = _runs(config)
    same = [run for run in runs if run.identity == mine]
    for run in same:
        if not run.finished and run.store.steps():
            return Choice(run.folder, created=False, told=f"going on with the unfinished run {run.folder.name}")
    told = ""
    if same and same[0].finished:
        told = f"the run of this config, {same[0].folder.name}, is finished: this is a new one"
    elif near := next((run for run in runs if not run.finished and run.store.steps()), None):
        told = (
            f"the unfinished run {near.folder.name} has another config, so this is a new one "
            f"(to go on with it: --run-id {near.folder.name} --resume latest):\n{_differences(near, settings)}"
        )
    return _new(config, run_id, told)


def _latest(config: RunConfig, run_id: str | None) -> Run:
    if run_id is not None:
        run = read_run(_output(config) / run_id)
        if run is None or not run.store.steps():
            raise UserInputError(
                f"--resume {config.train.resume}: the run '{run_id}' has no checkpoint.",
                why=f"Looked in {_output(config) / run_id}.",
                fix="Name another --run-id, or use --resume auto.",
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


def _from_best(config: RunConfig, run_id: str | None) -> Choice:
    run = _latest(config, run_id)
    best = run.store.best()
    if best is None:
        raise UserInputError(
            f"--resume best: no checkpoint of the run {run.folder.name} was evaluated.",
            fix="Use --resume latest, or a checkpoint's path.",
        )
    return _go_on_or_fork(config, None, run, run.store.path(best[0]), best[0])


def _from_path(config: RunConfig, run_id: str | None, path: Path) -> Choice:
    run = read_run(path)
    if run is not None:
        if not run.store.steps():
            raise UserInputError(f"--resume: the run {path} has no checkpoint.", fix="Use --resume never.")
        return Choice(run.folder, created=False)
    if not (path / MANIFEST).is_file():
        raise UserInputError(
            f"--resume: '{path}' is neither a checkpoint nor a run.",
            why="A checkpoint holds a manifest.json, a run a run.json.",
            fix="Give auto, latest, best, never, or the path of a checkpoint (…/checkpoints/step-000200).",
        )
    try:
        step = read_manifest(path).step
    except ManifestError as error:
        raise _corrupt(path, [str(error.damage)]) from error
    return _go_on_or_fork(config, run_id, read_run(path.parent.parent), path, step)


def _go_on_or_fork(config: RunConfig, run_id: str | None, run: Run | None, path: Path, step: int) -> Choice:
    damages = [str(damage) for damage in verify(path) if damage.spoils]
    if damages:
        raise _corrupt(path, damages)
    same_name = run is not None and run_id in (None, run.folder.name)
    if run is not None and same_name and not run.finished and run.store.steps()[-1:] == [step]:
        return Choice(run.folder, created=False)
    begun = _new(config, run_id, f"a new run that begins with a copy of {path}")
    target = CheckpointStore(begun.folder / CHECKPOINTS, keep=None)
    _copy(path, target.path(step))
    best = _best_until(path.parent, step)
    if best is not None and best != step:
        _copy(path.parent / target.path(best).name, target.path(best))
    return begun


def _best_until(folder: Path, step: int) -> int | None:
    """The best of what the old run had up to there; the new one must not forget it."""
    store = CheckpointStore(folder, keep=None)
    losses = [
        (manifest.eval_loss, earlier)
        for earlier in store.steps()
        if earlier <= step and (manifest := store.manifest(earlier)) is not None and manifest.eval_loss is not None
    ]
    sound = (at for _, at in sorted(losses) if not any(damage.spoils for damage in store.verify(at)))
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
        fix="Give another one: `shardtune checkpoints RUN --verify` tells which are sound; --resume latest finds it.",
    )


def _runs(config: RunConfig) -> list[Run]:
    """Runs in the output folder, the one started last first."""
    folder = _output(config)
    found = [run for path in (folder.iterdir() if folder.is_dir() else ()) if (run := read_run(path)) is not None]
    return sorted(found, key=lambda run: (run.started, run.folder.name), reverse=True)


def _output(config: RunConfig) -> Path:
    return Path(config.train.output_dir).expanduser().absolute()


def _differences(run: Run, settings: dict[str, Any]) -> str:
    found = changes(run.settings, settings)
    return "\n".join(f"  {change}" for change in found) or "  settings this version does not know"
