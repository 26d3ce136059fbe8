"""What the benchmark of slow networks scales and counts, and that its links are as slow as it says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from faults.cluster import Cluster, why_no_namespaces, why_no_token_bucket
from network import REFERENCE, Phase, Workload, equivalent, sent_bytes
from network_switch import SwitchedCluster

BYTES = 2 * 2**20
RECEIVE = f"""
import socket, time
with socket.create_server(("10.77.0.1", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    received, began = len(connection.recv(1)), time.perf_counter()
    while received < {BYTES}:
        received += len(connection.recv(1 << 16))
    print(received * 8 / (time.perf_counter() - began))
"""
SEND = f"""
import socket
with socket.create_connection(("10.77.0.1", 5000)) as connection:
    connection.sendall(bytes({BYTES}))
    input()
"""


def test_sending_takes_as_many_times_longer_than_computing_as_for_the_reference() -> None:
    toy = Workload(base_bytes=20e6, adapter_bytes=0, seconds=0.1)
    # 119 GB over 100 Gbit/s are 9.52 s, 7.477 times the 1.2732 s of a micro-batch; 20 MB in 0.7477 s are 214 Mbit/s.
    assert equivalent(100e9, toy) == pytest.approx(214e6, rel=1e-3)
    assert equivalent(1e9, toy) == pytest.approx(2.14e6, rel=1e-3)
    assert equivalent(1e9, REFERENCE) == pytest.approx(1e9)
    faster = replace(REFERENCE, seconds=REFERENCE.seconds / 2)
    assert equivalent(1e9, faster) == pytest.approx(2e9)


def test_a_step_that_does_not_end_is_counted_by_its_bytes() -> None:
    whole = Phase(steps=[2.0, 4.0, 2.0], seconds=8.0, sent=[300.0, 300.0])
    assert whole.steps_per_second(bytes_per_step=100.0) == 0.5
    part = Phase(steps=[], seconds=20.0, sent=[10.0, 30.0])
    assert part.steps_per_second(bytes_per_step=100.0) == pytest.approx(0.01)


@pytest.mark.parametrize("kind", [Cluster, SwitchedCluster])
def test_a_limited_link_is_as_fast_as_it_says_and_its_bytes_are_counted(kind: type[Cluster]) -> None:
    reason = why_no_namespaces() or (why_no_token_bucket() if kind is Cluster else why_no_tun())
    if reason is not None:
        pytest.skip(f"links cannot be limited here: {reason}")
    with kind(2, namespaces=True) as cluster:
        cluster.limit(10e6)
        assert 7.5e6 < transfer(cluster) < 12.5e6
        cluster.limit(None)
        assert transfer(cluster) > 20e6


def why_no_tun() -> str | None:
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


def transfer(cluster: Cluster) -> float:
    """Bits per second at which node 0 receives from node 1, whose interface must have counted what it sent."""
    with started(cluster, 0, RECEIVE) as receiver:
        assert receiver.stdout and receiver.stdout.readline() == "listening\n"
        with started(cluster, 1, SEND) as sender:
            rate = float(receiver.stdout.readline())
            counted = sent_bytes(sender.pid)
            sender.communicate("\n")
    assert counted > BYTES
    return rate


def started(cluster: Cluster, node: int, program: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", str(cluster.machines[node].namespace), sys.executable, "-c", program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
