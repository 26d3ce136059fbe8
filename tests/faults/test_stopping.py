"""A signal to any one process stops all nodes at the same step, with a code of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from faults.cluster import Cluster

BOUND = 60


def saved(cluster: Cluster) -> set[str]:
    return {(cluster.folder / "run" / f"saved-{rank}").read_text() for rank in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_launcher_stops_all_nodes_at_one_step(loopback: Cluster, number: signal.Signals) -> None:
    loopback.start_all_toys()
    loopback.wait_for_step(20, ranks=3)
    os.kill(loopback.machines[1].process.pid, number)
    assert [loopback.ended(node, BOUND) for node in range(3)] == [75, 75, 75]
    assert len(saved(loopback)) == 1
    assert all("error" not in machine.said() for machine in loopback.machines)


@pytest.mark.slow
def test_a_signal_to_one_rank_does_the_same(loopback: Cluster) -> None:
    loopback.start_all_toys()
    loopback.wait_for_step(20, ranks=3)
    os.kill(loopback.machines[2].worker(2), signal.SIGUSR1)
    assert [loopback.ended(node, BOUND) for node in range(3)] == [75, 75, 75]
    assert len(saved(loopback)) == 1


@pytest.mark.slow
def test_a_signal_before_there_is_anything_to_save_ends_all_at_once(loopback: Cluster) -> None:
    loopback.start_all_toys(env={"TOY_SLOW_START": "600"})
    started = [loopback.folder / "run" / f"started-{rank}" for rank in range(3)]
    loopback.wait(lambda: all(map(Path.exists, started)), 90, "the start of all ranks")
    os.kill(loopback.machines[2].worker(2), signal.SIGTERM)
    assert [loopback.ended(node, BOUND) for node in range(3)] == [75, 75, 75]
    assert not list((loopback.folder / "run").glob("saved-*"))


@pytest.mark.slow
def test_a_signal_while_nodes_wait_for_each_other_ends_the_wait(loopback: Cluster) -> None:
    loopback.start_toy(0)
    loopback.wait(lambda: "waiting for nodes 1, 2" in loopback.machines[0].said(), 60, "the wait")
    os.kill(loopback.machines[0].process.pid, signal.SIGTERM)
    assert loopback.ended(0, BOUND) == 75


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_save(loopback: Cluster) -> None:
    loopback.start_all_toys(env={"TOY_SLOW_SAVE": "600"})
    loopback.wait_for_step(20, ranks=3)
    for machine in loopback.machines:
        os.kill(machine.process.pid, signal.SIGTERM)
    loopback.wait(lambda: len(list((loopback.folder / "run").glob("saved-*"))) == 3, 30, "the save")
    time.sleep(1.5)  # later than what counts as the same signal, handed on twice
    for machine in loopback.machines:
        os.kill(machine.process.pid, signal.SIGTERM)
    assert [loopback.ended(node, BOUND) for node in range(3)] == [143, 143, 143]
