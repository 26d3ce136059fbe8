"""One fault while three nodes work: all of them end in time, and each tells the same cause once."""

from __future__ import annotations

import json
import os
import signal

import pytest
from faults.cluster import Cluster

# The step's deadline here is 6 s and a node's 6 s (cluster.py); all must be gone within that and a minute.
BOUND = 6 + 60


def assert_all_tell(cluster: Cluster, nodes: list[int], code: int, *words: str) -> None:
    """Every one of `nodes` ended in time with `code`, told one error, and that names what `words` say."""
    codes = {node: cluster.ended(node, BOUND) for node in nodes}
    assert codes == dict.fromkeys(nodes, code)
    for node in nodes:
        said = cluster.machines[node].said()
        for word in words:
            assert word in said, f"node {node}: {said}"
        assert said.count("error: ") + said.count("failed first") == 1, f"node {node} told more than one: {said}"


def test_a_killed_worker_ends_all_nodes_and_is_named(loopback: Cluster) -> None:
    loopback.start_all_toys()
    loopback.wait_for_step(40, ranks=3)
    os.kill(loopback.machines[1].worker(1), signal.SIGKILL)
    assert_all_tell(loopback, [0, 1, 2], 137, "Rank 1 (node 1, ", "was killed by signal 9 (SIGKILL)", "dmesg")


@pytest.mark.slow
def test_a_stopped_worker_is_found_out_and_its_stack_is_kept(networked: Cluster) -> None:
    networked.start_all_toys()
    networked.wait_for_step(40, ranks=3)
    os.kill(networked.machines[1].worker(1), signal.SIGSTOP)
    assert_all_tell(
        networked, [0, 1, 2], 76, "Rank 1 (node 1, ", "was stopped (SIGSTOP or a debugger)", "waited for it"
    )
    crash = networked.folder / "run" / "crash"
    assert "toy_worker.py" in (crash / "rank-1.txt").read_text(), "the stack of the stopped rank itself"
    assert "kernel state T" in (crash / "rank-1.txt").read_text()
    assert "toy_worker.py" in (crash / "rank-0.txt").read_text()
    assert json.loads((crash / "rank-0-collectives.json").read_text())["entries"], (
        "the flight recorder's last collectives"
    )
    found = json.loads((crash / "findings.json").read_text())
    assert {finding["rank"]: finding["kind"] for finding in found["findings"]}[1] == "stopped"


@pytest.mark.slow
def test_a_cut_cable_is_noticed_on_both_sides(networked: Cluster) -> None:
    networked.start_all_toys()
    networked.wait_for_step(40, ranks=3)
    networked.partition(2)
    assert_all_tell(networked, [0, 1], 69, "Node 2 (", "stopped responding")
    assert_all_tell(networked, [2], 69, "Lost the connection to the master (node 0, 10.77.0.1:29500)")


@pytest.mark.slow
def test_a_node_that_is_gone_is_named(networked: Cluster) -> None:
    networked.start_all_toys()
    networked.wait_for_step(40, ranks=3)
    networked.machines[2].kill()
    assert_all_tell(networked, [0, 1], 69, "Node 2 (", "stopped responding")


@pytest.mark.slow
def test_a_master_that_is_gone_is_named(loopback: Cluster) -> None:
    loopback.start_all_toys()
    loopback.wait_for_step(40, ranks=3)
    loopback.machines[0].kill()
    assert_all_tell(
        loopback, [1, 2], 69, "Lost the connection to the master (node 0, 127.0.0.1:", "The connection broke"
    )


@pytest.mark.slow
def test_a_rank_that_hangs_reading_data_is_told_from_those_that_wait_for_it(loopback: Cluster) -> None:
    loopback.start_all_toys(env={"FAULT": "hang-data:1:40"})
    assert_all_tell(
        loopback, [0, 1, 2], 76, "Rank 1 (node 1, ", "hung while reading a batch of data (step 40)", "Its stack:"
    )


@pytest.mark.slow
def test_an_exception_on_one_rank_is_told_and_not_what_the_others_make_of_it(loopback: Cluster) -> None:
    loopback.start_all_toys(env={"FAULT": "exception:2:40"})
    assert_all_tell(
        loopback, [0, 1, 2], 1, "Rank 2 (node 2, ", "failed first while computing a step (step 40)",
        "ValueError: the toy was told to fail here",
    )  # fmt: skip


@pytest.mark.slow
def test_a_slow_network_is_no_fault(networked: Cluster) -> None:
    networked.start_all_toys()
    networked.wait_for_step(5, ranks=3)
    if not networked.delay(1, 100):
        pytest.skip("this kernel has no netem: a network cannot be delayed here")
    networked.wait_for_step(30, ranks=3)
    os.kill(networked.machines[0].process.pid, signal.SIGTERM)
    assert [networked.ended(node, BOUND) for node in range(3)] == [75, 75, 75]
