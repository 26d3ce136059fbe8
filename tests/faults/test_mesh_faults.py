"""A rank is killed, a rank is stopped, a node is cut off: under each mesh all nodes end as documented, and what is started
again learns the weights of a run that nobody disturbed."""

from __future__ import annotations

import os
import signal

import pytest
from faults.cluster import Cluster
from faults.soak import BACK_SECONDS, MORE_STEPS, Job
from train.interrupted import final_weights, on_processes

from shardtune.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 6  # before a fault; a checkpoint is written every four


class Nodes:
    """Three nodes that train, without restarts."""

    def __init__(self, cluster: Cluster, **parallel: object) -> None:
        self.cluster, self.job = cluster, Job(cluster, 0, **parallel)
        self.said = [0, 0, 0]  # characters by earlier attempts

    def work(self) -> None:
        self.said = [len(machine.said()) for machine in self.cluster.machines]
        before, log = self.job.now(), self.job.log
        self.job.start_all()
        self.cluster.wait(
            lambda: log.read().attempts > before and log.steps_of_attempt > STEPS, BACK_SECONDS, f"{STEPS} more steps"
        )

    def assert_end(self, nodes: list[int], code: int, *words: str) -> None:
        assert {node: self.cluster.ended(node, BACK_SECONDS) for node in nodes} == dict.fromkeys(nodes, code)
        for node in nodes:
            said = self.cluster.machines[node].said()[self.said[node] :]
            assert all(word in said for word in words) and said.count("error: ") == 1, f"node {node}: {said}"


@pytest.mark.parametrize(
    ("shard", "nproc"),
    [
        pytest.param("full", 1, marks=pytest.mark.nightly),
        pytest.param("replicate", 1, marks=pytest.mark.nightly),
        ("hybrid", 2),
    ],
)
def test_faults_end_as_documented_and_the_resumed_run_is_as_if_none_had_been(
    networked: Cluster, environment: dict[str, str], nproc: int, shard: str
) -> None:
    nodes, victim = Nodes(networked, nproc=nproc, shard=shard), nproc  # the first rank of node 1
    nodes.work()
    os.kill(networked.machines[1].worker(victim), signal.SIGKILL)
    nodes.assert_end([0, 1, 2], 137, f"Rank {victim} (node 1, ", "was killed by signal 9 (SIGKILL)")
    nodes.work()
    os.kill(networked.machines[1].worker(victim), signal.SIGSTOP)
    nodes.assert_end([0, 1, 2], 76, f"Rank {victim} (node 1, ", "was stopped (SIGSTOP or a debugger)")
    nodes.work()
    networked.partition(2)
    nodes.assert_end([0, 1], 69, "Node 2 (", "stopped responding")
    nodes.assert_end([2], 69, "Lost the connection to the master (node 0, 10.77.0.1:29500)")
    networked.heal(2)
    job = nodes.job
    job.steps = CheckpointStore(job.run / "checkpoints", None).steps()[-1] + MORE_STEPS
    job.start_all()
    disturbed = job.finish()
    on_one_node = [f"train.max_steps={job.steps}"]
    if shard == "hybrid":
        on_one_node.append(f"parallel.shard_size={nproc}")
    on_processes(environment, job.config, {3 * nproc: [{"run_id": "whole", "overrides": on_one_node}]})
    assert final_weights(job.run.parent / "whole") == disturbed
