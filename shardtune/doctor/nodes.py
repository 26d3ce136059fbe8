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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardtune.config.redact import hide_text, is_secret
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
from shardtune.launch.control_connection import ControlConnection, KeyValue, MasterConnection, NodeConnection
from shardtune.launch.network import SECRET_VARIABLE, Network
from shardtune.launch.rendezvous import NodeGroup, TablePoller, rendezvous
from shardtune.launch.workers import LocalWorkers
from shardtune.run.node_facts import NodeFacts, digests, versions
from shardtune.terminal import size

_REPORT_SECONDS = 120.0  # for the slowest node's checks, after all have joined
_LINK_SECONDS = 240.0
_READ_SECONDS = 5.0  # node 0 waits this long for the others to read the verdict
_DIAGNOSTICS = {"NCCL_RUN_DIAGNOSTICS", "NCCL_RUN_RAS_DIAGNOSTICS"}  # of NCCL 2.31
_SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "CUDA_VISIBLE", "OMP_")


@dataclass(frozen=True)
class Examination:
    """What is known at the end.

    Attributes:
        reports: Of every node on node 0; elsewhere its own.
        findings: What concerns all nodes together.
        links: What `collectives` measured, on node 0.
        others: Node 0's verdict, elsewhere.
    """

    reports: tuple[NodeReport, ...]
    findings: tuple[Finding, ...] = ()
    links: Mapping[str, Any] | None = None
    others: Verdict = "ok"

    @property
    def verdict(self) -> Verdict:
        """The same on all nodes, once they have joined."""
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
            found[f"variable {name}"] = hide_text(value)
    return found


def examine(
    system: System, job: Job, findings: Sequence[Finding], network: Network, log: Callable[[str], None]
) -> Examination:
    """Join the other nodes, compare, time the links. Whatever prevents that is a finding."""
    mine = NodeReport(job.node.node_rank, socket.gethostname(), tuple(findings), facts_of(system, job))
    section = job.config.parallel if job.config is not None else ParallelSection()
    seconds, is_master = 60 * section.join_timeout_minutes, job.node.node_rank == 0
    if is_master and system.version("torch") is None:  # the ranks' store is torch's; there is a finding on packages
        return Examination((mine,))
    try:
        with closing(
            MasterConnection(job.node, network, log)
            if is_master
            else NodeConnection.join(job.node, network, seconds, log, _idle)
        ) as control:
            session = _Session(system, job, control, _meet(control, job, seconds, log))
            return session.as_master(mine) if is_master else session.as_node(mine)
    except ShardtuneError as error:
        found = fail("nodes", " ".join(filter(None, (error.what, error.why))), error.fix)
        return Examination((mine,), (found,))


def _meet(control: ControlConnection, job: Job, seconds: float, log: Callable[[str], None]) -> NodeGroup:
    """Without versions and settings: a run refuses nodes that differ in them, and here all differences are listed."""
    facts = NodeFacts(job.node.node_rank, job.node.nnodes, job.nproc)
    try:
        return rendezvous(control, facts, job.node, 0, seconds, log, _idle)
    except UserInputError:
        if job.node.node_rank == 0 and job.node.nnodes > 1:
            time.sleep(1)  # the others are about to read the same message from this master's table
        raise


def _idle() -> None:
    """Signals keep their usual effect while waiting: there is nothing to save."""


def _add_failure(text: str, values: KeyValue) -> None:
    values.add("doctor/failed", json.dumps(text))  # the first stays


class _Session:
    """What nodes do after they have joined, over the table on the master."""

    def __init__(self, system: System, job: Job, control: ControlConnection, group: NodeGroup) -> None:
        self.system, self.job, self.control, self.group = system, job, control, group
        self._others = range(1, job.node.nnodes)

    def as_master(self, mine: NodeReport) -> Examination:
        table = self._table(_REPORT_SECONDS)
        reports, skews = self._gather(table, mine)
        findings = [*differences(reports), *clock_skew(reports, skews)]
        failed = worst([*findings, *(finding for report in reports for finding in report.findings)]) == "fail"
        table.write("doctor/collectives", not failed)
        links = None
        if failed:
            findings.append(warn("links", "not timed, because a check has failed", "Fix it, and run this again."))
        else:
            links, problem = self._collectives()
            findings += [problem] if problem is not None else judge_links(self.system, links)
        examination = Examination(tuple(reports), tuple(findings), links)
        table.write("doctor/verdict", examination.verdict)
        table = self._table(_READ_SECONDS)
        while not all(table.read(f"doctor/read/{node}") for node in self._others) and table.pause():
            pass
        return examination

    def as_node(self, mine: NodeReport) -> Examination:
        table = self._table(_REPORT_SECONDS)
        table.write(f"doctor/report/{mine.node}", asdict(replace(mine, clock=self.system.clock())))
        problem = None
        if self._wait_for("doctor/collectives", _REPORT_SECONDS):
            _, problem = self._collectives()
        verdict = self._wait_for("doctor/verdict", _LINK_SECONDS)
        table.write(f"doctor/read/{mine.node}", True)
        return Examination((mine,), (problem,) if problem else (), None, verdict)

    def _gather(self, table: TablePoller, mine: NodeReport) -> tuple[list[NodeReport], dict[int, tuple[float, float]]]:
        """All reports, and for each node the bounds of how far its clock is ahead of this one's: it was sent after the
        last look and before this one."""
        reports, skews, last_look = {0: mine}, {}, self.system.clock()
        while missing := [node for node in self._others if node not in reports]:
            look = self.system.clock()
            for node in missing:
                if (value := table.read(f"doctor/report/{node}")) is not None:
                    reports[node] = report = NodeReport.from_dict(value)
                    skews[node] = (report.clock - self.system.clock(), report.clock - last_look)
            last_look = look
            if not table.pause():
                raise ShardtuneError(
                    f"Node {', '.join(map(str, missing))} joined, but did not report within {table.waited:.0f} s.",
                    fix="See its own output.",
                )
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
            measured = problem is None and result.exists()
            return (json.loads(result.read_text(encoding="utf-8")) if measured else None), problem

    def _environ(self, result: Path) -> dict[str, str]:
        hidden = (SECRET_VARIABLE, "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
        environ = {name: value for name, value in os.environ.items() if name not in hidden}
        own = {RESULT_VARIABLE: str(result), DEVICE_VARIABLE: self.job.device, "NCCL_DEBUG": "INFO"}
        if self.job.device == "cuda":
            own |= dict.fromkeys(_DIAGNOSTICS & known_names(self.system), "1")
        return {"OMP_NUM_THREADS": "1", **environ, **own}

    def _supervise(self, workers: LocalWorkers) -> Finding | None:
        """Until all ranks of this node have ended, or one of any node has failed."""
        table, in_time = self._table(_LINK_SECONDS), True
        while True:
            codes = workers.codes()
            if len(codes) == self.job.nproc and not any(codes.values()):
                return None
            if any(codes.values()) or not in_time:
                where = f"node {self.group.assignment.node} ({self.group.assignment.host})"
                texts = [finding.text or finding.kind for finding in workers.findings()] or ["no end in time"]
                text = f"{where}: {texts[0].strip().splitlines()[-1]}"  # of a traceback its error
                table.call(partial(_add_failure, text))
            if (cause := table.read("doctor/failed")) is not None:
                return fail("links", f"timing the links failed on {cause}", "See the other findings and that node.")
            in_time = table.pause()

    def _wait_for(self, key: str, seconds: float) -> Any:
        table = self._table(seconds + _REPORT_SECONDS)
        while (value := table.read(key)) is None:
            if not table.pause():
                raise ShardtuneError("Node 0 has not answered.", fix="See the output of node 0.")
        return value

    def _table(self, seconds: float) -> TablePoller:
        return TablePoller(self.control, seconds, _idle)
