"""Start the processes of this node, supervise them together with the other nodes, and report how the run ended."""

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
from shardtune.launch.control_connection import (
    ControlConnection,
    KeyValue,
    MasterConnection,
    MasterLostError,
    NodeConnection,
)
from shardtune.launch.coordinator import Coordinator, Directive, Exchange, Report, end_directive, on_masters_clock
from shardtune.launch.network import SECRET_VARIABLE, Network, read_network
from shardtune.launch.process_role import Node
from shardtune.launch.rank_process import STOPPED_EARLY
from shardtune.launch.rendezvous import NodeGroup, facts_of, rendezvous
from shardtune.launch.script_ranks import ScriptRanks
from shardtune.launch.workers import LocalWorkers, RankAssignment
from shardtune.machine import usable_cores
from shardtune.run.exit_codes import (
    DONE,
    INTERRUPTED,
    LOST,
    PREEMPTED,
    TERMINATED,
    stop_signal,
    stop_signals,
    stopped_by,
)
from shardtune.run.failure import render
from shardtune.run.findings import cause_of
from shardtune.run.folder import CHECKPOINTS
from shardtune.run.node_facts import NodeFacts
from shardtune.run.stop_request import stopping_after_step
from shardtune.terminal import fitted

if TYPE_CHECKING:
    from shardtune.config.schema import ParallelSection, RunConfig

_POLL_SECONDS = 0.1
_COLLECT_SECONDS = 3.0  # for the other ranks to end by themselves after a failure, and to record why
_READ_SECONDS = 5.0  # the master waits this long for the others to read its final directive


def process_count(asked: int | str, device: str, *, force: bool = False) -> int:
    """The number of processes on this node; `auto` is one per GPU, or one.

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
            f"{count} processes were requested, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}.",
            fix=f"Use --nproc {gpus} or auto, or parallel.device: cpu.",
        )
    if count > 1:
        check_capacity(count, None if gpus else usable_cores(), force=force)
    return count


def threads_per_process(nproc: int) -> int:
    """The cores this process may use, divided by the number of processes."""
    return max(1, usable_cores() // nproc)


def launch(
    command: list[str],
    node: Node,
    nproc: int,
    config: RunConfig,
    environ: Mapping[str, str],
    script: ScriptRanks | None = None,
) -> int:
    """Run `command` in `nproc` processes on this node; returns the exit code.

    With several nodes their launchers rendezvous at the master, start together, end together and print the same
    cause. A failure that a restart can cure is followed by a restart of all ranks, up to `parallel.max_restarts` times.

    Args:
        script: The command runs a user's script.
    """
    network = read_network(environ, node)
    rank_environ = {name: value for name, value in environ.items() if name != SECRET_VARIABLE}
    with _Signals() as signals:
        facts = facts_of(node, nproc, config, script.settings if script is not None else {})
        launcher = _Launcher(command, node, network, facts, config.parallel, signals, rank_environ, script)
        try:
            return launcher.run()
        except _StoppedBeforeStart:
            assert signals.first is not None
            print(launcher.stopped_early, flush=True)
            return stopped_by(signals.first)
        finally:
            launcher.close()


class _StoppedBeforeStart(Exception):
    pass


class _Signals:
    """The stop signals this launcher got and has not forwarded yet."""

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

    def raise_if_stopped(self) -> None:
        if self.first is not None:
            raise _StoppedBeforeStart

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.first = number if self.first is None else self.first
        self._waiting.append(number)


@dataclass
class _Launcher:
    command: list[str]
    node: Node
    network: Network
    facts: NodeFacts
    settings: ParallelSection
    signals: _Signals
    environ: Mapping[str, str]
    script: ScriptRanks | None = None
    control: ControlConnection | None = None

    @property
    def stopped_early(self) -> str:
        return STOPPED_EARLY if self.script is None else self.script.stopped

    def close(self) -> None:
        """Ends threads and stores before the interpreter shuts down."""
        if self.control is not None:
            self.control.close()
            self.control = None

    def run(self) -> int:
        restarts_left, attempt = self.settings.max_restarts, 0
        while True:
            control = self.control = self.control or self._open()
            try:
                group = self._rendezvous(control, attempt)
                attempt = group.assignment.attempt
                directive = self._attempt(control, group, restarts_left)
            except MasterLostError as error:  # during the rendezvous
                directive = Directive("end", code=LOST, text=render(error), restart=restarts_left > 0)
            self._print_outcome(directive, restarts_left)
            if not directive.restart:
                return directive.code
            if self.script is not None and isinstance(control, MasterConnection):
                control.renew_store()  # env:// has no prefix for an attempt: keys of the last one would be found
            restarts_left, attempt = restarts_left - 1, attempt + 1
            if control.silent_for() > self.settings.node_timeout_seconds:
                self.close()
                attempt = 0  # the master is gone; a new one counts from 0

    def _open(self) -> ControlConnection:
        if self.node.node_rank == 0:
            master = MasterConnection(self.node, self.network, _log)
            if self.script is not None:
                self.script.publish(master)
            return master
        seconds = 60 * self.settings.join_timeout_minutes
        return NodeConnection.join(self.node, self.network, seconds, _log, self.signals.raise_if_stopped)

    def _rendezvous(self, control: ControlConnection, attempt: int) -> NodeGroup:
        seconds = 60 * self.settings.join_timeout_minutes
        try:
            return rendezvous(control, self.facts, self.node, attempt, seconds, _log, self.signals.raise_if_stopped)
        except UserInputError:
            if self.node.node_rank == 0 and self.node.nnodes > 1:
                time.sleep(1)  # the others are about to read the same message from this master's table
            raise

    def _attempt(self, control: ControlConnection, group: NodeGroup, restarts_left: int) -> Directive:
        """Start the ranks of this node and follow the master's directives until the final one."""
        exchange: Exchange
        if isinstance(control, MasterConnection):
            coordinator = Coordinator(group.hosts, self.settings.node_timeout_seconds, restarts_left, time.monotonic())
            exchange = _MasterSide(control.table, coordinator, group.assignment.attempt)
        else:
            assert isinstance(control, NodeConnection)
            exchange = _NodeSide(control, group.assignment.attempt, self.settings.node_timeout_seconds, restarts_left)
        workers, folder = self._start(control, group.assignment)
        try:
            directive = _supervise(workers, exchange, self.signals)
        finally:
            workers.kill()
        folder = folder or workers.folder_of_run()
        hint = self._resume_hint(folder)
        # A refused command does not end the run that it would have resumed; a refused restart does.
        if directive.code != UserInputError.exit_code or group.assignment.attempt or not hint:
            _write_failure_file(directive, folder)
        if directive.text and not directive.restart and directive.code != UserInputError.exit_code:
            directive = replace(directive, text=directive.text + hint)
        if directive.code in (INTERRUPTED, PREEMPTED) and not workers.has_begun_training():
            print(self.stopped_early, flush=True)
        workers.close()
        if isinstance(exchange, _MasterSide):
            exchange.wait_until_read()
        return directive

    def _start(self, control: ControlConnection, assignment: RankAssignment) -> tuple[LocalWorkers, Path | None]:
        """The ranks of this node, and the run's folder where it is known by now."""
        environ = {**self.environ, "OMP_NUM_THREADS": self._threads()}
        if self.script is None:
            return LocalWorkers(self.command, assignment, environ), None
        folder = self.script.folder(control, self.signals.raise_if_stopped)
        variables = self.script.variables(assignment, folder, self.settings.max_restarts)
        return LocalWorkers(self.command, assignment, environ, variables, self.script.output(folder)), folder

    def _resume_hint(self, folder: Path | None) -> str:
        """How to resume the run, for the end of a message; empty where there is no checkpoint on this node."""
        try:
            steps = CheckpointStore(folder / CHECKPOINTS, keep=None).steps() if folder is not None else []
        except UnreadableStoreError:
            steps = []
        if not steps or folder is None:
            return ""
        if self.script is not None:
            return self.script.hint(steps[-1], folder)
        return f"\n  run: {folder} has a checkpoint of step {steps[-1]}; the same command resumes from it."

    def _threads(self) -> str:
        return self.environ.get("OMP_NUM_THREADS") or str(threads_per_process(self.facts.nproc))

    def _print_outcome(self, directive: Directive, restarts_left: int) -> None:
        if directive.text:
            print(fitted(directive.text, sys.stderr), file=sys.stderr, flush=True)
        if directive.restart:
            total = self.settings.max_restarts
            _log(f"restarting ({total - restarts_left + 1} of at most {total} restarts, --max-restarts)")


class _MasterSide:
    """The master's side of an attempt: reads the other nodes' reports from its table, decides, publishes."""

    def __init__(self, table: KeyValue, coordinator: Coordinator, attempt: int) -> None:
        self.table, self.coordinator, self.attempt = table, coordinator, attempt
        self._others = range(1, len(coordinator.hosts))

    def __call__(self, report: Report) -> Directive:
        self.coordinator.receive(report, time.monotonic())
        for node in self._others:
            if (text := self.table.get(f"report/{self.attempt}/{node}")) is not None:
                self.coordinator.receive(on_masters_clock(Report.from_json(text), time.time()), time.monotonic())
        directive = self.coordinator.directive(time.monotonic(), time.time())
        self.table.set(f"directive/{self.attempt}", directive.to_json())
        return directive

    def wait_until_read(self) -> None:
        """Returns when the others have read the final directive, or after a few seconds."""
        deadline = time.monotonic() + _READ_SECONDS
        while time.monotonic() < deadline:
            if all(self.table.get(f"read/{self.attempt}/{node}") for node in self._others):
                return
            time.sleep(_POLL_SECONDS)


class _NodeSide:
    """The side of every other node: reports, and follows directives; without the master it ends by itself."""

    def __init__(self, control: NodeConnection, attempt: int, node_timeout: float, restarts_left: int) -> None:
        self.control, self.attempt, self.restarts_left = control, attempt, restarts_left
        self.node_timeout = node_timeout
        self._report: Report | None = None
        self._directive = Directive()

    def __call__(self, report: Report) -> Directive:
        self._report = report
        if self._directive.state == "end":
            return self._directive
        if self.control.silent_for() > self.node_timeout:
            return self._without_master(report)
        self.control.post(self._exchange)
        return self._directive

    def _exchange(self, table: KeyValue) -> None:
        assert self._report is not None
        table.set(f"report/{self.attempt}/{self._report.node}", self._report.to_json())
        if (text := table.get(f"directive/{self.attempt}")) is not None:
            directive = Directive.from_json(text)
            if directive.state == "end":
                table.set(f"read/{self.attempt}/{self._report.node}", "yes")
            self._directive = directive

    def _without_master(self, report: Report) -> Directive:
        """The master is gone: the cause is what failed here, if anything did, and otherwise the loss of the master."""
        lost_error = self.control.lost_error()
        if report.state not in ("failed", "collected"):
            return Directive("collect")
        findings = [finding for finding in report.findings if finding.kind not in ("peer_lost", "waiting")]
        if findings:
            return end_directive(cause_of(findings, 2), findings, self.restarts_left, time.time())
        return Directive("end", code=LOST, text=render(lost_error), restart=self.restarts_left > 0)


def _supervise(workers: LocalWorkers, exchange: Exchange, signals: _Signals) -> Directive:
    """Poll the ranks, report, follow the directive, until it is `end`."""
    assignment = workers.assignment
    report = Report(assignment.node, assignment.host)
    forwarded = 0
    failed_at: float | None = None
    while True:
        time.sleep(_POLL_SECONDS)
        codes = workers.codes()
        for number in signals.take():
            workers.send(number)
            if not forwarded and workers.has_begun_training():
                _log(stopping_after_step(number, of_script=workers.is_script))
            forwarded = forwarded or number
            report = replace(report, signal=forwarded, state="stopping" if report.state == "running" else report.state)
        report = _updated_report(workers, report, codes, forwarded)
        report = replace(report, count=report.count + 1, time=time.time())
        directive = exchange(report)
        if directive.state == "end":
            return directive
        if directive.state == "stop" and not forwarded:
            forwarded = directive.signal
            workers.send(forwarded)
        if directive.state == "collect" and report.state not in ("collected", "done"):
            failed_at = failed_at or time.monotonic()
            everyone_ended = len(codes) == assignment.nproc
            if everyone_ended or time.monotonic() - failed_at > _COLLECT_SECONDS:
                findings = tuple(workers.findings())
                workers.kill()
                report = replace(report, state="collected", findings=findings)


def _updated_report(workers: LocalWorkers, report: Report, codes: dict[int, int], forwarded: int) -> Report:
    """The report, given the exit codes and ranks that hang."""
    if report.state in ("collected", "done"):
        return report
    bad = [code for code in codes.values() if code != 0 and stop_signal(code) is None]
    if bad or workers.hung():
        return replace(report, state="failed")
    stopped = [number for code in codes.values() if (number := stop_signal(code)) is not None]
    if len(codes) == workers.assignment.nproc:
        code = stopped_by(min(stopped)) if stopped else DONE  # SIGINT is the smaller number
        return replace(report, state="done", code=TERMINATED if TERMINATED in codes.values() else code)
    if stopped and not forwarded:  # one rank was stopped before there was anything to save: stop the others, too
        return replace(report, state="stopping", signal=int(stopped[0]))
    return report


def _write_failure_file(directive: Directive, folder: Path | None) -> None:
    """All findings, beside the stacks: `findings.json` for the last failure, and one file for each failure.

    Named by the cause's time, which is the same on all nodes: on a shared disk they write the same file.
    """
    if directive.findings and folder is not None and folder.is_dir():
        crash = folder / "crash"
        record = {
            "time": directive.time, "message": directive.text, "exit_code": directive.code,
            "restart": directive.restart, "findings": directive.findings,
        }  # fmt: skip
        when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(directive.findings[0]["time"]))
        try:
            crash.mkdir(exist_ok=True)
            for name in (f"findings-{when}.json", "findings.json"):
                replace_file(crash / name, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            print(f"warning: could not write {crash}: {error.strerror}", file=sys.stderr)


def _log(text: str) -> None:
    print(fitted(f"launcher: {text}", sys.stderr), file=sys.stderr, flush=True)
