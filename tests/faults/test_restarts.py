"""With --max-restarts all nodes meet again after a failure, and the run is done in the end."""

from __future__ import annotations

import os
import signal

import pytest
from faults.cluster import Cluster

pytestmark = pytest.mark.slow
BOUND = 120
STEPS = {"TOY_STEPS": "250"}


def test_a_killed_worker_is_started_again_with_all_the_others(loopback: Cluster) -> None:
    loopback.start_all_toys(env=STEPS, max_restarts=1)
    loopback.wait_for_step(40, ranks=3)
    os.kill(loopback.machines[1].worker(1), signal.SIGKILL)
    assert [loopback.ended(node, BOUND) for node in range(3)] == [0, 0, 0]
    assert all("restarting (1 of at most 1 restarts" in machine.said() for machine in loopback.machines)
    assert {(loopback.folder / "run" / f"total-{rank}").read_text() for rank in range(3)} == {"1500.0"}


def test_restarts_are_counted(loopback: Cluster) -> None:
    loopback.start_all_toys(max_restarts=1)
    for _ in range(2):
        loopback.wait_for_step(40, ranks=3)
        os.kill(loopback.machines[0].worker(0), signal.SIGKILL)
        for file in (loopback.folder / "run").glob("step-*"):
            file.unlink()
    assert [loopback.ended(node, BOUND) for node in range(3)] == [137, 137, 137]


def test_a_node_that_was_started_anew_takes_its_seat_again(networked: Cluster) -> None:
    networked.start_all_toys(env=STEPS, max_restarts=2)
    networked.wait_for_step(40, ranks=3)
    networked.machines[2].kill()
    networked.start_toy(2, env=STEPS, max_restarts=2)
    assert [networked.ended(node, BOUND) for node in range(3)] == [0, 0, 0]


def test_a_master_that_was_started_anew_gathers_the_others(loopback: Cluster) -> None:
    loopback.start_all_toys(env=STEPS, max_restarts=2)
    loopback.wait_for_step(40, ranks=3)
    loopback.machines[0].kill()
    loopback.start_toy(0, env=STEPS, max_restarts=2)
    assert [loopback.ended(node, BOUND) for node in range(3)] == [0, 0, 0]
