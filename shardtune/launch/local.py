"""Start the processes of this node, watch over them together with the other nodes, and say how it ended."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shardtune.checkpoint.store import CheckpointStore, UnreadableStoreError
from shardtune.durable import replace_file
from shardtune.errors import UserInputError
from shardtune.launch.capacity import check_capacity
from shardtune.launch.coordinator import Coordinator, Directive, Exchange, Report, end_directive, on_masters_clock
from shardtune.launch.ending import STOPPED_EARLY
from shardtune.launch.link import KeyValue, Link, MasterLink, MasterLostError, NodeLink
from shardtune.launch.meeting import Met, facts_of, meet
from shardtune.launch.network import SECRET_VARIABLE, Network, read_network
from shardtune.launch.place import Node
from shardtune.launch.workers import LocalWorkers
from shardtune.machine import usable_cores
from shardtune.run.exit_codes import (
    DONE,
    INTERRUPTED,
    LEFT_AT_ONCE,
    LOST,
    PREEMPTED,
    stop_signal,
    stop_signals,
    stopped_by,
)
from shardtune.run.failure import render
from shardtune.run.findings import cause_of
from shardtune.run.folder import CHECKPOINTS
from shardtune.run.node_facts import Facts
from shardtune.run.stop_request import stopping_after_step
from shardtune.terminal import fitted

if TYPE_CHECKING:
    from shardtune.config.schema import ParallelSection, RunConfig

_LOOK = 0.1  # seconds between two looks at the processes
_SETTLE = 3.0  # seconds for the other ranks to end by themselves after a failure, and to say what they saw
_FAREWELL = 5.0  # seconds the master stays for the others to read its last word


def process_count(asked: int | str, device: str, *, force: bool = False) -> int:
    """How many processes `auto` is here: one per GPU, or one.

    Raises:
        UserInputError: more processes than GPUs, or (unless `force`) than this machine has memory or cores for.
    """
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if asked == "auto":
        return max(1, gpus)
    count = int(asked)
    if gpus and count > gpus:
        raise UserInputError(
            f"{count} processes were asked for, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}.",
            fix=f"Use --nproc {gpus} or auto, or parallel.device: cpu.",
        )
    if count > 1:
        check_capacity(count, None if gpus else usable_cores(), force=force)
    return count


def threads_per_process(nproc: int) -> int:
    """The cores this process may use, shared out."""
    return max(1, usable_cores() // nproc)


def launch(command: list[str], node: Node, nproc: int, config: RunConfig, environ: Mapping[str, str]) -> int:
    """Run `command` in `nproc` processes on this node; returns the exit code.

    With several nodes their launchers meet at the master, start together, end together and tell the same cause. A
    failure that is nobody's mistake is followed by another start of all, `parallel.max_restarts` times.
    """
    network = read_network(environ, node)
    of_ranks = {name: value for name, value in environ.items() if name != SECRET_VARIABLE}
    with _Signals() as signals:
        launcher = _Launcher(command, node, network, facts_of(node, nproc, config), config.parallel, signals, of_ranks)
        try:
            return launcher.run()
        except _StoppedWhileMeeting:
            assert signals.first is not None
            print(STOPPED_EARLY, flush=True)
            return stopped_by(signals.first)
        finally:
            launcher.close()


class _StoppedWhileMeeting(Exception):
    pass


class _Signals:
    """The stop signals this launcher got and has not handed on yet."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._waiting: list[int] = []
        self._former: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        for number in stop_signals():
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def take(self) -> list[int]:
        taken, self._waiting = self._waiting, []
        return taken

    def leave_if_asked(self) -> None:
        if self.first is not None:
            raise _StoppedWhileMeeting

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.first = number if self.first is None else self.first
        self._waiting.append(number)


@dataclass
class _Launcher:
    command: list[str]
    node: Node
    network: Network
    facts: Facts
    settings: ParallelSection
    signals: _Signals
    environ: Mapping[str, str]
    link: Link | None = None

    def close(self) -> None:
        """Before the interpreter ends: no thread and no store is left to it."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def run(self) -> int:
        restarts_left, attempt = self.settings.max_restarts, 0
        while True:
            link = self.link = self.link or self._open()
            try:
                met = self._meet(link, attempt)
                attempt = met.assignment.attempt
                word = self._attempt(link, met, restarts_left)
            except MasterLostError as error:  # while meeting
                word = Directive("end", code=LOST, text=render(error), restart=restarts_left > 0)
            self._tell(word, restarts_left)
            if not word.restart:
                return word.code
            restarts_left, attempt = restarts_left - 1, attempt + 1
            if link.silent_for() > self.settings.node_timeout_seconds:
                self.close()
                attempt = 0  # the master is gone; a new one counts from the beginning

    def _open(self) -> Link:
        if self.node.node_rank == 0:
            return MasterLink(self.node, self.network, _say)
        seconds = 60 * self.settings.join_timeout_minutes
        return NodeLink.join(self.node, self.network, seconds, _say, self.signals.leave_if_asked)

    def _meet(self, link: Link, attempt: int) -> Met:
        seconds = 60 * self.settings.join_timeout_minutes
        try:
            return meet(link, self.facts, self.node, attempt, seconds, _say, self.signals.leave_if_asked)
        except UserInputError:
            if self.node.node_rank == 0 and self.node.nnodes > 1:
                time.sleep(1)  # the others are about to read the same words from this master's table
            raise

    def _attempt(self, link: Link, met: Met, restarts_left: int) -> Directive:
        """Start the ranks of this node and follow the master's word until it is the last one."""
        exchange: Exchange
        if isinstance(link, MasterLink):
            coordinator = Coordinator(met.hosts, self.settings.node_timeout_seconds, restarts_left, time.monotonic())
            exchange = _MasterSide(link.table, coordinator, met.assignment.attempt)
        else:
            assert isinstance(link, NodeLink)
            exchange = _NodeSide(link, met.assignment.attempt, self.settings.node_timeout_seconds, restarts_left)
        environ = {**self.environ, "OMP_NUM_THREADS": self._threads()}
        workers = LocalWorkers(self.command, met.assignment, environ)
        try:
            word = _supervise(workers, exchange, self.signals)
        finally:
            workers.kill()
        folder = workers.folder_of_run()
        # A refused command is not the end of the run that it wanted to go on with; a refused restart is.
        if word.code != UserInputError.exit_code or met.assignment.attempt or not _saved(folder):
            _keep(word, folder)
        if word.text and not word.restart and word.code != UserInputError.exit_code:
            word = replace(word, text=word.text + _saved(folder))
        if word.code in (INTERRUPTED, PREEMPTED) and not workers.has_begun_training():
            print(STOPPED_EARLY, flush=True)
        workers.close()
        if isinstance(exchange, _MasterSide):
            exchange.wait_until_read()
        return word

    def _threads(self) -> str:
        return self.environ.get("OMP_NUM_THREADS") or str(threads_per_process(self.facts.nproc))

    def _tell(self, word: Directive, restarts_left: int) -> None:
        if word.text:
            print(fitted(word.text, sys.stderr), file=sys.stderr, flush=True)
        if word.restart:
            total = self.settings.max_restarts
            _say(f"starting again ({total - restarts_left + 1} of at most {total} times, --max-restarts)")


class _MasterSide:
    """The master's side of an attempt: hears the other nodes through its table, decides, publishes."""

    def __init__(self, table: KeyValue, coordinator: Coordinator, attempt: int) -> None:
        self.table, self.coordinator, self.attempt = table, coordinator, attempt
        self._others = range(1, len(coordinator.hosts))

    def __call__(self, report: Report) -> Directive:
        self.coordinator.hear(report, time.monotonic())
        for node in self._others:
            if (said := self.table.get(f"report/{self.attempt}/{node}")) is not None:
                self.coordinator.hear(on_masters_clock(Report.from_json(said), time.time()), time.monotonic())
        word = self.coordinator.word(time.monotonic(), time.time())
        self.table.set(f"word/{self.attempt}", word.to_json())
        return word

    def wait_until_read(self) -> None:
        """Stay until the others have read the last word, or cannot."""
        deadline = time.monotonic() + _FAREWELL
        while time.monotonic() < deadline:
            if all(self.table.get(f"read/{self.attempt}/{node}") for node in self._others):
                return
            time.sleep(_LOOK)


class _NodeSide:
    """The side of every other node: reports, and follows; without the master it ends by itself."""

    def __init__(self, link: NodeLink, attempt: int, node_timeout: float, restarts_left: int) -> None:
        self.link, self.attempt, self.restarts_left = link, attempt, restarts_left
        self.node_timeout = node_timeout
        self._report: Report | None = None
        self._word = Directive()

    def __call__(self, report: Report) -> Directive:
        self._report = report
        if self._word.state == "end":
            return self._word
        if self.link.silent_for() > self.node_timeout:
            return self._alone(report)
        self.link.post(self._round)
        return self._word

    def _round(self, table: KeyValue) -> None:
        assert self._report is not None
        table.set(f"report/{self.attempt}/{self._report.node}", self._report.to_json())
        if (said := table.get(f"word/{self.attempt}")) is not None:
            word = Directive.from_json(said)
            if word.state == "end":
                table.set(f"read/{self.attempt}/{self._report.node}", "yes")
            self._word = word

    def _alone(self, report: Report) -> Directive:
        """The master is gone. What failed here, if anything did, is told; otherwise that."""
        lost = self.link.lost()
        if report.state not in ("failed", "settled"):
            return Directive("collect")
        findings = [finding for finding in report.findings if finding.kind not in ("echo", "waiting")]
        if findings:
            return end_directive(cause_of(findings, 2), findings, self.restarts_left, time.time())
        return Directive("end", code=LOST, text=render(lost), restart=self.restarts_left > 0)


def _supervise(workers: LocalWorkers, exchange: Exchange, signals: _Signals) -> Directive:
    """Look, report, do as the word says, until it is `end`."""
    assignment = workers.assignment
    report = Report(assignment.node, assignment.host)
    handed_on = 0
    failed_at: float | None = None
    while True:
        time.sleep(_LOOK)
        codes = workers.codes()
        for number in signals.take():
            workers.send(number)
            if not handed_on and workers.has_begun_training():
                _say(stopping_after_step(number))
            handed_on = handed_on or number
            report = replace(report, signal=handed_on, state="stopping" if report.state == "running" else report.state)
        report = _looked(workers, report, codes, handed_on)
        report = replace(report, count=report.count + 1, time=time.time())
        word = exchange(report)
        if word.state == "end":
            return word
        if word.state == "stop" and not handed_on:
            handed_on = word.signal
            workers.send(handed_on)
        if word.state == "collect" and report.state not in ("settled", "done"):
            failed_at = failed_at or time.monotonic()
            everyone_ended = len(codes) == assignment.nproc
            if everyone_ended or time.monotonic() - failed_at > _SETTLE:
                findings = tuple(workers.findings())
                workers.kill()
                report = replace(report, state="settled", findings=findings)


def _looked(workers: LocalWorkers, report: Report, codes: dict[int, int], handed_on: int) -> Report:
    """The report after a look at the exit codes and at ranks that hang."""
    if report.state in ("settled", "done"):
        return report
    bad = [code for code in codes.values() if code != 0 and stop_signal(code) is None]
    if bad or workers.hung():
        return replace(report, state="failed")
    stopped = [number for code in codes.values() if (number := stop_signal(code)) is not None]
    if len(codes) == workers.assignment.nproc:
        code = stopped_by(min(stopped)) if stopped else DONE  # SIGINT is the smaller number
        return replace(report, state="done", code=LEFT_AT_ONCE if LEFT_AT_ONCE in codes.values() else code)
    if stopped and not handed_on:  # one rank was told to stop before there was anything to save: so are the others
        return replace(report, state="stopping", signal=int(stopped[0]))
    return report


def _saved(folder: Path | None) -> str:
    """How the run can go on, for the end of a message; empty where there is no checkpoint on this node."""
    try:
        steps = CheckpointStore(folder / CHECKPOINTS, keep=None).steps() if folder is not None else []
    except UnreadableStoreError:
        steps = []
    return f"\n  run: {folder} has a checkpoint of step {steps[-1]}; the same command goes on from it." if steps else ""


def _keep(word: Directive, folder: Path | None) -> None:
    """Everything that was found, beside the stacks, for whoever looks later: of the last failure, and of each one.

    Named by the cause's time, which is the same on all nodes: on a shared disk they write the same file.
    """
    if word.findings and folder is not None and folder.is_dir():
        crash = folder / "crash"
        found = {
            "time": word.time, "told": word.text, "exit_code": word.code, "restart": word.restart,
            "findings": word.findings,
        }  # fmt: skip
        when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(word.findings[0]["time"]))
        try:
            crash.mkdir(exist_ok=True)
            for name in (f"findings-{when}.json", "findings.json"):
                replace_file(crash / name, json.dumps(found, indent=1) + "\n")
        except OSError as error:
            print(f"warning: {crash} was not written: {error.strerror}", file=sys.stderr)


def _say(text: str) -> None:
    print(fitted(f"launcher: {text}", sys.stderr), file=sys.stderr, flush=True)
