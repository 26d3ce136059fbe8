"""From a config file to a running process: checks first, then this process trains, or starts those that do."""

from __future__ import annotations

import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path

from shardtune.config import ResolvedConfig, load_config
from shardtune.config.accelerate_file import neutralise
from shardtune.data.source import check_dataset_path
from shardtune.errors import UserInputError
from shardtune.launch.failure import report_failure
from shardtune.launch.local import launch, process_count, threads_per_process
from shardtune.launch.place import Node, Worker, read_place
from shardtune.launch.run_folder import FOLDER_VARIABLE
from shardtune.launch.which_run import choose_run
from shardtune.model.locate import check_model_folder


def start(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    environ: MutableMapping[str, str],
) -> int:
    """Train as `config` says; returns the exit code.

    Whatever can be found wrong without torch is found here, once, before any process is started.
    """
    place = read_place(environ)
    if isinstance(place, Worker):
        # A worker's errors go to its launcher, which tells them once for all ranks.
        return _work(config, overrides, accelerate_config, run_id, place, environ)
    resolved = load_config(config, overrides, accelerate_config, environ)
    if place.node_rank == 0 or resolved.config.model.load == "read-all":  # others may get the model from rank 0
        check_model_folder(resolved.config.model.model_name_or_path)
    check_dataset_path(resolved.config.data)
    nproc = _processes(place, resolved)
    if place.nnodes > 1:  # rank 0 makes the folder, wherever it is
        return launch(_arguments(config, overrides, accelerate_config, run_id), place, nproc)
    chosen = choose_run(resolved.config, run_id)
    if chosen.told:
        print(chosen.told, flush=True)
    environ[FOLDER_VARIABLE] = str(chosen.folder)
    if nproc == 1:
        code = _work(config, overrides, accelerate_config, run_id, Worker(0, 1, 0), environ)
    else:
        code = launch(_arguments(config, overrides, accelerate_config, run_id), place, nproc)
    if code == UserInputError.exit_code and chosen.created:
        shutil.rmtree(chosen.folder)  # nothing was trained, and the name is free for the corrected command
    return code


def _processes(node: Node, resolved: ResolvedConfig) -> int:
    asked = resolved.config.parallel.nproc
    if asked == "auto" and node.nproc is not None:
        asked = node.nproc
    return process_count(asked, resolved.config.parallel.device)


def _work(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    place: Worker,
    environ: MutableMapping[str, str],
) -> int:
    # accelerate warns when it is unset, and then sets what torch takes anyway.
    environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(int(environ.get("LOCAL_WORLD_SIZE", "1")))))
    environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    try:
        resolved = load_config(config, overrides, accelerate_config, environ)
        neutralise(environ)  # what accelerate launch set is translated by now; the Trainer must not act on it too
        from shardtune.train.run import train

        code = train(resolved, run_id=run_id)
    except Exception as error:  # noqa: BLE001 - the last line of defence of a process: told, and its code returned
        code = report_failure(error, place.rank)
        if place.world_size > 1:
            os._exit(code)  # threads of a broken process group would keep this process alive
    return code


def _arguments(config: Path, overrides: list[str], accelerate_config: Path | None, run_id: str | None) -> list[str]:
    words = ["train", str(config)]
    for override in overrides:
        words += ["--override", override]
    if accelerate_config is not None:
        words += ["--accelerate-config", str(accelerate_config)]
    if run_id is not None:
        words += ["--run-id", run_id]
    return words
