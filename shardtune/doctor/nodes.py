"""Are all nodes together fit? Every node publishes its findings; node 0 compares them, and then all links are timed."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardtune.config.redact import is_secret
from shardtune.config.schema import ParallelSection
from shardtune.doctor.collectives import DEVICE_VARIABLE, RESULT_VARIABLE
from shardtune.doctor.compare import clock_skew, differences, judge_links
from shardtune.doctor.finding import Finding, NodeReport, Verdict, fail, warn, worst
from shardtune.doctor.job import Job
from shardtune.doctor.limits import memlock
from shardtune.doctor.nccl_variables import known_names
from shardtune.doctor.network import mtu_to_master
from shardtune.doctor.system import System
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.launch.control_connection import ControlConnection, MasterConnection, NodeConnection
from shardtune.launch.network import SECRET_VARIABLE, Network
from shardtune.launch.rendezvous import NodeGroup, rendezvous
from shardtune.launch.workers import LocalWorkers
from shardtune.run.node_facts import NodeFacts, digests, versions
from shardtune.terminal import size

_POLL_SECONDS = 0.05
_CALL_SECONDS = 30.0
_REPORT_SECONDS = 120.0  # for the slowest node's checks, after all have joined
_LINK_SECONDS = 240.0
_SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_VISIBLE", "OMP_")


@dataclass(frozen=True)
class Examination:
    """What is known at the end: every node's report on node 0 (elsewhere its own), what concerns all, and the links.

    Attributes:
        verdict: The same on all nodes, once they have joined.
    """

    reports: tuple[NodeReport, ...]
    findings: tuple[Finding, ...] = ()
    links: Mapping[str, Any] | None = None
    others: Verdict = "ok"

    @property
    def verdict(self) -> Verdict:
        own = [finding for report in self.reports for finding in report.findings]
        return worst([*own, *self.findings, Finding("other nodes", self.others, "")])


def facts_of(system: System, job: Job) -> dict[str, str]:
    """What should be the same on every node."""
    limit, mtu = memlock(system), mtu_to_master(system, job)
    found = {
        **{f"package {name}": version for name, version in versions().items()},
        **{f"setting {key}": digest for key, digest in (digests(job.config) if job.config else {}).items()},
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "driver": str(system.gpus.get("driver", "none")),
        "CUDA of torch": str(system.torch_cuda or "none"),
        "GPUs": ", ".join(str(card.get("name")) for card in system.visible_gpus) or "none",
        "processes": str(job.nproc),
        "memlock": "no limit" if limit is None else size(limit),
        "RDMA devices": str(len(system.rdma_devices)),
    }
    if mtu is not None:
        found["MTU"] = mtu[1]
    for name, (value, _) in system.settings.items():
        if name.startswith(_SETTINGS) and not is_secret(name):
            found[f"variable {name}"] = value
    return found


def examine(
    system: System, job: Job, findings: Sequence[Finding], network: Network, log: Callable[[str], None]
) -> Examination:
    """Join the other nodes, compare, time the links. Whatever prevents that is a finding."""
    mine = NodeReport(job.node.node_rank, socket.gethostname(), tuple(findings), facts_of(system, job), system.clock())
    section = job.config.parallel if job.config is not None else ParallelSection()
    seconds = 60 * section.join_timeout_minutes
    try:
        with closing(_open(job, network, seconds, log)) as control:
            facts = NodeFacts(job.node.node_rank, job.node.nnodes, job.nproc)  # versions are compared by `differences`
            group = _meet(control, facts, job, seconds, log)
            session = _Session(system, job, control, group, log)
            return session.as_master(mine) if job.node.node_rank == 0 else session.as_node(mine)
    except ShardtuneError as error:
        return Examination((mine,), (_as_finding("nodes", error),))


def _open(job: Job, network: Network, seconds: float, log: Callable[[str], None]) -> ControlConnection:
    if job.node.node_rank == 0:
        return MasterConnection(job.node, network, log)
    return NodeConnection.join(job.node, network, seconds, log, _idle)


def _meet(
    control: ControlConnection, facts: NodeFacts, job: Job, seconds: float, log: Callable[[str], None]
) -> NodeGroup:
    try:
        return rendezvous(control, facts, job.node, 0, seconds, log, _idle)
    except UserInputError:
        if job.node.node_rank == 0 and job.node.nnodes > 1:
            time.sleep(1)  # the others are about to read the same message from this master's table
        raise


def _idle() -> None:
    """Signals keep their usual effect here: there is nothing to save."""


def _as_finding(check: str, error: ShardtuneError) -> Finding:
    return fail(check, " ".join(filter(None, (error.what, error.why))), error.fix)


class _Session:
    """What nodes do after they have joined, over the table on the master."""

    def __init__(
        self, system: System, job: Job, control: ControlConnection, group: NodeGroup, log: Callable[[str], None]
    ) -> None:
        self.system, self.job, self.control, self.group, self.log = system, job, control, group, log

    def as_master(self, mine: NodeReport) -> Examination:
        reports, skews = self._gather(mine)
        findings = [*differences(reports), *clock_skew(reports, skews)]
        failed = worst([*findings, *(finding for report in reports for finding in report.findings)]) == "fail"
        self._set("collectives", not failed)
        if failed:
            links = None
            findings.append(warn("links", "not timed, because a check has failed", "Fix it, and run this again."))
        else:
            links, problem = self._collectives()
            findings += [problem] if problem is not None else judge_links(self.system, links)
        examination = Examination(tuple(reports), tuple(findings), links)
        self._set("verdict", examination.verdict)
        self._wait_until_read()
        return examination

    def as_node(self, mine: NodeReport) -> Examination:
        self._set(f"report/{mine.node}", asdict(NodeReport(**{**vars(mine), "clock": self.system.clock()})))
        problem = None
        if self._wait_for("collectives", _REPORT_SECONDS):
            _, problem = self._collectives()
        verdict = self._wait_for("verdict", _LINK_SECONDS)
        self._set(f"read/{mine.node}", True)
        return Examination((mine,), (problem,) if problem else (), None, verdict)

    def _gather(self, mine: NodeReport) -> tuple[list[NodeReport], dict[int, tuple[float, float]]]:
        """All reports, and for each node the bounds of how far its clock is ahead of this one's."""
        reports, skews = {0: mine}, {}
        before, deadline = self.system.clock(), time.monotonic() + _REPORT_SECONDS
        while len(reports) < self.job.node.nnodes:
            if time.monotonic() > deadline:
                missing = [str(node) for node in range(self.job.node.nnodes) if node not in reports]
                raise ShardtuneError(
                    f"Node {', '.join(missing)} joined, but did not report within {_REPORT_SECONDS:.0f} s.",
                    fix="See its own output.",
                )
            now = self.system.clock()
            for node in range(1, self.job.node.nnodes):
                if node not in reports and (value := self._get(f"report/{node}")) is not None:
                    reports[node] = report = NodeReport.from_json(json.dumps(value))
                    skews[node] = (report.clock - self.system.clock(), report.clock - before)
            before = now
            time.sleep(_POLL_SECONDS)
        return [reports[node] for node in sorted(reports)], skews

    def _collectives(self) -> tuple[dict[str, Any] | None, Finding | None]:
        """Start this node's ranks and wait for them; what they measured is on node 0 alone."""
        with tempfile.TemporaryDirectory(prefix="shardtune-doctor-") as folder:
            result = Path(folder) / "links.json"
            workers = LocalWorkers(
                [sys.executable, "-m", "shardtune.doctor.collectives"], self.group.assignment, self._environ(result)
            )
            try:
                problem = self._supervise(workers)
            finally:
                workers.kill()
                workers.close()
            if problem is not None or not result.exists():
                return None, problem
            return json.loads(result.read_text(encoding="utf-8")), None

    def _environ(self, result: Path) -> dict[str, str]:
        hidden = (SECRET_VARIABLE, "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
        environ = {name: value for name, value in os.environ.items() if name not in hidden}
        own = {RESULT_VARIABLE: str(result), DEVICE_VARIABLE: self.job.device, "NCCL_DEBUG": "INFO"}
        if self.job.device == "cuda":
            names = known_names(self.system)
            own |= {name: "1" for name in ("NCCL_RUN_DIAGNOSTICS", "NCCL_RUN_RAS_DIAGNOSTICS") if name in names}
        return {**environ, "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"), **own}

    def _supervise(self, workers: LocalWorkers) -> Finding | None:
        """Until all ranks of this node have ended, or one of any node has failed."""
        deadline = time.monotonic() + _LINK_SECONDS
        while True:
            codes = workers.codes()
            if len(codes) == self.job.nproc and not any(codes.values()):
                return None
            if any(codes.values()) or time.monotonic() > deadline:
                where = f"node {self.group.assignment.node} ({self.group.assignment.host})"
                texts = [finding.text or finding.kind for finding in workers.findings()] or ["no end in time"]
                self._add("failed", f"{where}: {texts[0].strip().splitlines()[-1]}")  # of a traceback its error
            if (text := self._get("failed")) is not None:
                return fail("links", f"timing the links failed on {text}", "See the other findings and that node.")
            time.sleep(2 * _POLL_SECONDS)

    def _wait_until_read(self) -> None:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if all(self._get(f"read/{node}") for node in range(1, self.job.node.nnodes)):
                return
            time.sleep(_POLL_SECONDS)

    def _wait_for(self, key: str, seconds: float) -> Any:
        deadline = time.monotonic() + seconds + _CALL_SECONDS
        while (value := self._get(key)) is None:
            if time.monotonic() > deadline:
                raise ShardtuneError("Node 0 has not answered.", fix="See the output of node 0.")
            time.sleep(_POLL_SECONDS)
        return value

    def _get(self, key: str) -> Any:
        text = self.control.call(lambda table: table.get(f"doctor/{key}"), _CALL_SECONDS, _idle)
        return None if text is None else json.loads(text)

    def _add(self, key: str, value: Any) -> None:
        """The first value stays."""
        self.control.call(lambda table: table.add(f"doctor/{key}", json.dumps(value)), _CALL_SECONDS, _idle)

    def _set(self, key: str, value: Any) -> None:
        self.control.call(lambda table: table.set(f"doctor/{key}", json.dumps(value)), _CALL_SECONDS, _idle)
