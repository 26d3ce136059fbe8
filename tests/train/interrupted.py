"""Runs in this process that end where a test wants them to, by request or by accident, and what they wrote."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState
from ranks import free_ports, on_ranks

from shardtune.config import load_config
from shardtune.run.folder import FOLDER_VARIABLE
from shardtune.train.loop import TrainingLoop
from shardtune.train.run import train

Sessions = dict[int, list[dict[str, Any]]]  # by how many processes they have
NUMBERS = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "entropy", "token_accuracy")


class Crash(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches a power cut."""


def run(
    config: Path, *overrides: str, run_id: str | None = None, stop_at: int | None = None, crash_at: int | None = None
) -> int | None:
    """Train here; the exit code, or None after the crash (right after everything that belongs to step `crash_at`)."""
    os.environ.pop(FOLDER_VARIABLE, None)
    AcceleratorState._reset_state(reset_partial_state=True)
    with ending_at(stop_at, crash_at):
        try:
            return train(load_config(config, overrides, environ={}), run_id=run_id)
        except Crash:
            return None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # the files a dead process would have let go of


def whole_cut_and_alone(environment: dict[str, str], config: Path) -> Path:
    """Three runs of batches of four rows, and where they are: `whole` undisturbed on two processes; `cut`, which breaks
    down there after step 4 (with its evaluation and checkpoint) and goes on; `alone` on one process."""
    cut = [{"run_id": "cut", "crash_at": 4}, {"run_id": "cut"}]
    on_processes(environment, config, four_rows({2: [{"run_id": "whole"}, *cut], 1: [{"run_id": "alone"}]}))
    return config.parent / "runs"


def four_rows(sessions: Sessions) -> Sessions:
    """In each step, on any number of processes."""
    return {
        nproc: [{**one, "overrides": [f"train.per_device_train_batch_size={4 // nproc}"]} for one in wanted]
        for nproc, wanted in sessions.items()
    }


def on_processes(environment: dict[str, str], config: Path, sessions: Sessions, timeout: float = 400) -> None:
    """Runs one after the other; each is what `run` is called with."""
    asked = {
        nproc: [{**one, "port": port} for one, port in zip(wanted, free_ports(len(wanted)), strict=True)]
        for nproc, wanted in sessions.items()
    }
    worker = Path(__file__).parent / "resume_worker.py"
    on_ranks(environment, worker, list(asked), config, json.dumps(asked), timeout=timeout)


@contextmanager
def ending_at(stop_at: int | None, crash_at: int | None) -> Iterator[None]:
    """Every rank is asked to stop, or breaks down, at the given step."""
    agree, after_step = TrainingLoop._agree_on_requests, TrainingLoop._log_evaluate_save

    def asked(self: TrainingLoop) -> None:
        if self.state.global_step == stop_at:
            self.training.stop.signal = signal.SIGTERM
        agree(self)

    def crash(self: TrainingLoop) -> None:
        after_step(self)
        if self.state.global_step == crash_at:
            self.saver.finish()  # the thread of a process that is gone would go on in this one
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_agree_on_requests", asked)
        patch.setattr(TrainingLoop, "_log_evaluate_save", crash)
        yield


def lines(folder: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """The numbers of each log line by step; a step that was done again must have given the same."""
    found: dict[int, dict[str, Any]] = {}
    for text in (folder / f"events-rank{rank}.jsonl").read_text().splitlines():
        event = json.loads(text)
        if event["event"] == "step":
            numbers = {name: event[name] for name in NUMBERS}
            assert found.setdefault(event["step"], numbers) == numbers
    return found


def evaluations(folder: Path) -> dict[int, float]:
    texts = (folder / "events-rank0.jsonl").read_text().splitlines()
    return {e["step"]: e["loss"] for e in map(json.loads, texts) if e["event"] == "eval"}


def final_weights(folder: Path) -> bytes:
    return (folder / "final" / "adapter_model.safetensors").read_bytes()
