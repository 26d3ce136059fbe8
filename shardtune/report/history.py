"""What do the events of a run add up to? Columns of numbers by rank, and what happened beside them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.observe.events import VERSION
from shardtune.report.columns import Columns, Numbers, together
from shardtune.report.failures import Failure, current, read_failures
from shardtune.report.metrics import Metrics
from shardtune.report.read import Event, Tail, event_files, listed, mapping, number, read_json, text, whole
from shardtune.report.script import ScriptRecord, read_script
from shardtune.report.status import ENDINGS, Liveness

_KNOWN_VERSION = VERSION
_MOST_MARKS = 5000  # a run that warns at every step must not use up the reader's memory
_GROUPS = {
    "seconds": ("step", "data", "forward", "backward", "optimizer", "collective"),
    "tokens": ("supervised", "real", "padded"),
    "collectives": ("shard", "replicate", "other"),
    "collectives_between_nodes": ("shard", "replicate", "other"),
    "memory": ("allocated", "reserved", "peak"),
    "host": ("rss", "cpu_percent"),
    "gpu": ("utilization", "sm_clock_mhz", "power_watts", "temperature_c", "memory_used"),
}
_ALONE = ("tokens_per_second", "samples", "samples_per_second", "tflops", "hardware_tflops", "mfu", "hfu")
_VERSION_1 = {"step_seconds": "seconds.step", "host_peak_bytes": "host.rss", "gpu_peak_bytes": "memory.peak"}
# Field of a profile event → name in it → column; a number that stands alone is under its own name.
_PROFILED = {
    **{group: {name: f"{group}.{name}" for name in names} for group, names in _GROUPS.items()},
    **{name: {name: name} for name in _ALONE},
    **{old: {old: new} for old, new in _VERSION_1.items()},
}
_STEP_COLUMNS = (
    "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "epoch", "entropy", "token_accuracy",
)  # fmt: skip


@dataclass
class Mark:
    """Something that happened at a step: a checkpoint, a warning, a guard, a restart."""

    kind: str
    step: int
    time: float
    text: str
    ranks: set[int] = field(default_factory=set)
    detail: Event = field(default_factory=dict)


@dataclass
class Facts:
    """What is written once, or the last value of it."""

    starts: list[Event] = field(default_factory=list)
    resumes: list[Event] = field(default_factory=list)
    data: Event | None = None
    plan: Event | None = None
    proof: Event | None = None
    ending: Event | None = None
    out_of_memory: list[Event] = field(default_factory=list)
    samples: list[Event] = field(default_factory=list)
    scores: list[Event] = field(default_factory=list)
    hardware: dict[int, Event] = field(default_factory=dict)
    weights: dict[int, Event] = field(default_factory=dict)


class RunHistory:
    """One run, as far as it has been written. `update` continues reading where it stopped.

    What is the same on every rank (loss, plan, data) is taken from the lowest rank that has a file; profiles are kept
    by rank, as is the usage of the machine, whose columns have a second where the others have a step.
    """

    def __init__(self, folder: Path, *, lowest_rank_alone: bool = False) -> None:
        """Args:
        lowest_rank_alone: Read no other rank's file: all that is the same on every rank, and no profile of the others.
        """
        self.folder = folder
        self._lowest_alone = lowest_rank_alone
        self._tails: dict[int, Tail] = {}
        self.failures: tuple[Failure, ...] = ()
        self.script: ScriptRecord | None = None  # of a run of `shardtune run`
        self.is_behind = False  # there is more to read than the last `update` had time for
        self._clear()

    def _clear(self) -> None:
        self.facts = Facts()
        self.train, self.evals = Columns(keep_undone=True), Columns()
        self.eval_groups: dict[int, Event] = {}  # `groups` of the last evaluation at a step, where it has any
        self.profile: dict[int, Columns] = {}
        self.metrics = Metrics()
        self.usage: dict[int, Columns] = {}
        self.sample_unit = "samples"
        self.throttled: dict[int, Counter[str]] = {}
        self.marks: list[Mark] = []
        self.marks_left_out = 0
        self._same: dict[tuple[str, int, str], Mark] = {}
        self.unknown: Counter[str] = Counter()
        self.unreadable = 0
        self.newer_version = 0
        self.first_time: float | None = None
        self.last_time: float | None = None
        self._at: dict[int, int] = {}  # the current step of each rank, for events without one

    @property
    def ranks(self) -> list[int]:
        return sorted(self._tails)

    @property
    def last_step(self) -> int:
        steps = (columns.last_step for columns in (self.train, self.evals, *self.profile.values()))
        return max(*steps, self.metrics.last_step)

    def by_rank(self, column: str) -> dict[int, tuple[Numbers, Numbers]]:
        """A column of the steps' profiles, of each rank that has it."""
        found = {rank: columns.get(column) for rank, columns in sorted(self.profile.items())}
        return {rank: (x, y) for rank, (x, y) in found.items() if len(x)}

    def eval_loss_at(self, step: int) -> float | None:
        steps, losses = self.evals.get("loss")
        at = np.flatnonzero(steps == step)
        return float(losses[at[-1]]) if len(at) else None

    def samples_per_second(self) -> tuple[Numbers, Numbers]:
        """Of all ranks, at the steps that all of them have; empty where a rank does not tell its own."""
        found = self.by_rank("samples_per_second")
        ranks = whole(self.facts.starts[-1].get("world_size")) if self.facts.starts else None
        if not found or len(found) < (ranks or 1):
            return np.empty(0), np.empty(0)
        steps, rates = together(found)
        return steps, rates.sum(axis=0)

    @property
    def half_lines(self) -> int:
        return sum(tail.half_line for tail in self._tails.values())

    def update(self, seconds: float | None = None) -> bool:
        """Read what is new; True if there was anything.

        Args:
            seconds: Stop after about this long; the next call continues (a dashboard responds in between).
        """
        until = time.monotonic() + seconds if seconds is not None else None
        failures, script = read_failures(self.folder), read_script(self.folder)
        changed = self._find_files() or (failures != self.failures and bool(failures))
        changed |= script is not None and script != self.script
        self.failures = failures or self.failures  # a folder that is gone keeps what was read of it
        self.script = script or self.script
        more = True
        while more and (until is None or time.monotonic() < until):
            more = False
            for rank, tail in self._tails.items():
                news = tail.read()
                if news.restarted_file:
                    self._tails = {known: Tail(other.path) for known, other in self._tails.items()}
                    self._clear()
                    more = changed = True
                    break
                self.unreadable += news.unreadable
                for event in news.events:
                    self._handle(rank, event)
                more |= bool(news.events or news.unreadable)
            changed |= more
        self.is_behind = more
        return changed

    @property
    def liveness(self) -> Liveness:
        steps = [columns.times[-1] for columns in (self.train, *self.profile.values()) if len(columns)]
        exit_code = self.script.exit_code if self.script is not None else None
        return Liveness(
            recorded=number(read_json(self.folder / "run.json").get("started")),
            began=number(self.facts.starts[-1].get("time")) if self.facts.starts else None,
            last_step=max(steps, default=None),
            last_time=self.last_time,
            ending=self.facts.ending,
            is_script=self.script is not None,
            exit_code=exit_code,
        )

    @property
    def failure(self) -> Failure | None:
        """What ended it since its last start, according to its launcher."""
        return current(self.failures, number(self.facts.starts[-1].get("time")) if self.facts.starts else None)

    def reported_marks(self) -> list[Mark]:
        """The marks with one entry for each failure: the cause found by a launcher, or a guard, replaces what the ranks
        reported as a consequence."""
        causes = [mark for mark in self.marks if _explains_an_end(mark)]
        marks = [
            mark
            for mark in self.marks
            if not _is_consequence(mark)
            or (
                not any(abs(cause.time - mark.time) < 60 for cause in causes)
                and not any(failure.includes(mark.time, mark.ranks) for failure in self.failures)
            )
        ]
        for failure in self.failures:
            if any(failure.includes(cause.time, set()) for cause in causes):
                continue
            step = self._at.get(failure.rank or 0, 0) if failure.step is None else failure.step
            message = " ".join(part for part in (failure.sentence, failure.why, failure.fix) if part)
            ranks = failure.ranks if failure.rank is None else {failure.rank}
            marks.append(Mark("failure", step, failure.time, message, set(ranks)))
        return marks

    def _find_files(self) -> bool:
        files = event_files(self.folder)
        if self._lowest_alone:
            files = dict(list(files.items())[:1])
        if not files or list(files) == list(self._tails):
            return False  # a folder that is gone keeps what was read of it
        if self._tails and min(files) < min(self._tails):
            self._tails = {}
            self._clear()
        self._tails = {rank: self._tails.get(rank) or Tail(path) for rank, path in files.items()}
        return True

    def _handle(self, rank: int, event: Event) -> None:
        at = number(event.get("time")) or 0.0
        if at > 0 and at == at and at < 1e11:
            self.first_time = at if self.first_time is None else min(self.first_time, at)
            self.last_time = at if self.last_time is None else max(self.last_time, at)
        version = event.get("v")
        if isinstance(version, int) and version > _KNOWN_VERSION:
            self.newer_version = max(self.newer_version, version)
        step = whole(event.get("step"))
        if step is not None and event["event"] in ("step", "profile", "metrics"):
            self._at[rank] = step
        handler = _HANDLERS.get(event["event"])
        if handler is None:
            self.unknown[event["event"][:80]] += 1
        else:
            handler(self, rank, event, at)

    def _is_lowest(self, rank: int) -> bool:
        return rank == next(iter(self._tails))

    def _mark(self, kind: str, rank: int, event: Event, at: float, message: str) -> None:
        step = whole(event.get("step"))
        step = self._at.get(rank, 0) if step is None else step
        known = self._same.get((kind, step, message))
        if known is not None and abs(known.time - at) < 60:  # the same from another rank
            known.ranks.add(rank)
            return
        if len(self.marks) >= _MOST_MARKS:
            self.marks_left_out += 1
            return
        mark = Mark(kind, step, at, message, {rank}, event)
        self._same[kind, step, message] = mark
        self.marks.append(mark)

    def _rewind(self, rank: int, step: int) -> None:
        if self._is_lowest(rank):
            self.train.rewind(step)
            self.evals.rewind(step)
        if rank in self.profile:
            self.profile[rank].rewind(step)
        self.metrics.rewind(rank, step)
        self._at[rank] = step


def _explains_an_end(mark: Mark) -> bool:
    if mark.kind == "guard":
        return mark.detail.get("action") == "stop"
    return mark.kind == "failure" and mark.detail.get("event") in ("out_of_memory", "proof")


def _is_consequence(mark: Mark) -> bool:
    """Written by any rank that ends, whatever ended it."""
    return mark.kind == "failure" and mark.detail.get("event") in ("run_failed", "no_progress")


def _on_start(run: RunHistory, rank: int, event: Event, at: float) -> None:
    if not run._is_lowest(rank):
        return
    # Files are read rank by rank: another rank's failure that is already known may be of this start, not of the last.
    if run.facts.ending is not None and (number(run.facts.ending.get("time")) or 0.0) <= at:
        run.facts.ending = None
    run.facts.starts.append(event)
    if len(run.facts.starts) > 1:
        run._mark("restart", rank, event, at, f"Restarted (start {len(run.facts.starts)})")


def _on_resume(run: RunHistory, rank: int, event: Event, at: float) -> None:
    step = whole(event.get("step"))
    if step is None:
        return
    run._rewind(rank, step)
    if run._is_lowest(rank):
        run.facts.resumes.append(event)
        changed = [part for part in listed(event.get("changes")) if isinstance(part, str)]
        message = "; ".join([f"Resumed from the checkpoint of step {step:,}", *changed])
        last = run.marks[-1] if run.marks else None
        if last is not None and last.kind == "restart" and last.detail["event"] == "run_start":
            last.step, last.text = step, f"{last.text}. {message}"  # the same restart, with where it resumed
        else:
            run._mark("restart", rank, event, at, message)


def _on_step(run: RunHistory, rank: int, event: Event, at: float) -> None:
    step = whole(event.get("step"))
    if step is not None and run._is_lowest(rank):
        found = {name: value for name in _STEP_COLUMNS if (value := number(event.get(name))) is not None}
        run.train.add(step, at, found)


def _on_eval(run: RunHistory, rank: int, event: Event, at: float) -> None:
    step, value = whole(event.get("step")), number(event.get("loss"))
    if step is not None and value is not None and run._is_lowest(rank):
        rest = {name: number(event.get(name)) for name in ("entropy", "token_accuracy")}
        run.evals.add(step, at, {"loss": value, **{name: found for name, found in rest.items() if found is not None}})
        run.eval_groups[step] = mapping(event.get("groups"))


def _on_profile(run: RunHistory, rank: int, event: Event, at: float) -> None:
    step = whole(event.get("step"))
    if step is None:
        return
    run.profile.setdefault(rank, Columns()).add(step, at, _profiled(event))
    run.sample_unit = text(event.get("sample_unit")) or run.sample_unit
    reasons = mapping(event.get("gpu")).get("throttle")
    if isinstance(reasons, list) and reasons:
        run.throttled.setdefault(rank, Counter()).update(str(reason)[:60] for reason in reasons)


def _profiled(event: Event) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, inner in event.items():
        columns = _PROFILED.get(key)
        if columns is None:
            continue
        values = inner.items() if isinstance(inner, dict) else ((key, inner),)
        for name, given in values:
            column = columns.get(name)
            if column is not None and (value := number(given)) is not None:
                found[column] = value
    return found


def _on_usage(run: RunHistory, rank: int, event: Event, at: float) -> None:
    if 0 < at < 1e11:
        run.usage.setdefault(rank, Columns()).add(int(at), at, _profiled(event))


def _on_metrics(run: RunHistory, rank: int, event: Event, at: float) -> None:
    step = whole(event.get("step"))
    if step is not None:
        values = {name: number(value) for name, value in mapping(event.get("values")).items()}
        run.metrics.add(rank, step, at, {name: value for name, value in values.items() if value is not None})


def _on_guard(run: RunHistory, rank: int, event: Event, at: float) -> None:
    back = whole(event.get("to_step"))
    message = text(event.get("text")) or text(event.get("guard")) or "A guard was triggered"
    run._mark("guard", rank, event, at, message)
    if back is not None and event.get("action") == "rollback":
        run._rewind(rank, back)


def _on_out_of_memory(run: RunHistory, rank: int, event: Event, at: float) -> None:
    run.facts.out_of_memory.append(event)
    run._mark("failure", rank, event, at, f"Out of memory in {text(event.get('phase')) or 'an unknown phase'}")
    _on_ending(run, rank, event, at)


def _on_no_progress(run: RunHistory, rank: int, event: Event, at: float) -> None:
    run._mark("failure", rank, event, at, text(event.get("text")) or "No progress")
    _on_ending(run, rank, event, at)


def _on_failed(run: RunHistory, rank: int, event: Event, at: float) -> None:
    run._mark("failure", rank, event, at, text(event.get("text")) or "The run failed")
    _on_ending(run, rank, event, at)


def _on_ending(run: RunHistory, rank: int, event: Event, at: float) -> None:
    known = run.facts.ending
    # A failure on any rank counts, and is not replaced by one that only confirms it.
    if event["event"] != "run_end" and (known is None or known["event"] == "run_end"):
        began = number(run.facts.starts[-1].get("time")) if run.facts.starts else None
        if began is None or at >= began:
            run.facts.ending = event
    elif event["event"] == "run_end" and run._is_lowest(rank) and known is None:
        run.facts.ending = event


def _on_checkpoint(run: RunHistory, rank: int, event: Event, at: float) -> None:
    step = whole(event.get("step"))
    if run._is_lowest(rank) and step is not None:
        run._mark("checkpoint", rank, event, at, f"Checkpoint of step {step:,}")


def _on_checkpoint_failed(run: RunHistory, rank: int, event: Event, at: float) -> None:
    run._mark("warning", rank, event, at, f"Could not write a checkpoint: {text(event.get('error'))}")


def _on_proof(run: RunHistory, rank: int, event: Event, at: float) -> None:
    if run._is_lowest(rank) or event.get("ok") is False:
        run.facts.proof = event
    if event.get("ok") is False:
        run._mark("failure", rank, event, at, f"Training check failed: {text(event.get('problem'))}")


def _on_message(run: RunHistory, rank: int, event: Event, at: float) -> None:
    run._mark(event["event"], rank, event, at, text(event.get("text")))


def _on_sample(run: RunHistory, rank: int, event: Event, at: float) -> None:
    if run._is_lowest(rank):
        run.facts.samples.append(event)


def _on_score(run: RunHistory, rank: int, event: Event, at: float) -> None:
    if run._is_lowest(rank):
        run.facts.scores.append(event)


def _on_data(run: RunHistory, rank: int, event: Event, at: float) -> None:
    if run._is_lowest(rank):
        run.facts.data = event


def _on_plan(run: RunHistory, rank: int, event: Event, at: float) -> None:
    if run._is_lowest(rank):
        run.facts.plan = event


def _on_hardware(run: RunHistory, rank: int, event: Event, at: float) -> None:
    run.facts.hardware[rank] = event


def _on_weights(run: RunHistory, rank: int, event: Event, at: float) -> None:
    run.facts.weights[rank] = event


_HANDLERS: dict[str, Callable[[RunHistory, int, dict[str, Any], float], None]] = {
    "run_start": _on_start,
    "resume": _on_resume,
    "step": _on_step,
    "eval": _on_eval,
    "profile": _on_profile,
    "metrics": _on_metrics,
    "usage": _on_usage,
    "guard": _on_guard,
    "out_of_memory": _on_out_of_memory,
    "no_progress": _on_no_progress,
    "run_failed": _on_failed,
    "run_end": _on_ending,
    "checkpoint": _on_checkpoint,
    "checkpoint_failed": _on_checkpoint_failed,
    "proof": _on_proof,
    "warning": _on_message,
    "notice": _on_message,
    "sample": _on_sample,
    "score": _on_score,
    "data": _on_data,
    "plan": _on_plan,
    "hardware": _on_hardware,
    "weights": _on_weights,
}
assert set(ENDINGS) <= set(_HANDLERS)
