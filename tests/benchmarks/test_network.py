"""What the benchmark of slow networks scales and counts, and that its links are as slow as it says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.cluster import Cluster, why_no_namespaces

PROGRAM = Path(__file__).parent.parent.parent / "benchmarks" / "network.py"
MEGABYTES = 2
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    received, began = len(connection.recv(1)), time.perf_counter()
    while data := connection.recv(1 << 16):
        received += len(data)
    print(received * 8 / (time.perf_counter() - began))
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))"


@pytest.fixture(scope="module")
def network() -> Any:
    spec = importlib.util.spec_from_file_location("network", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["network"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_sending_takes_as_many_times_longer_than_computing_as_for_the_reference(network: Any) -> None:
    toy = network.Workload(base_bytes=20e6, adapter_bytes=0, seconds=0.1)
    for gigabits in (1, 10, 100):
        link = network.equivalent(gigabits * 1e9, toy)
        reference = network.REFERENCE.base_bytes * 8 / (gigabits * 1e9) / network.REFERENCE.seconds
        assert toy.base_bytes * 8 / link / toy.seconds == pytest.approx(reference)
    # 119 GB over 100 Gbit/s are 9.52 s, 7.48 times the 1.2732 s of a micro-batch; 20 MB in 0.748 s are 213.9 Mbit/s.
    assert network.equivalent(100e9, toy) == pytest.approx(213.9e6, rel=1e-3)


def test_the_reference_scales_to_itself(network: Any) -> None:
    assert network.equivalent(1e9, network.REFERENCE) == pytest.approx(1e9)
    faster = replace(network.REFERENCE, seconds=network.REFERENCE.seconds / 2)
    assert network.equivalent(1e9, faster) == pytest.approx(2e9)  # computes in half the time, so needs twice the link


def test_a_step_that_does_not_end_is_counted_by_its_bytes(network: Any) -> None:
    whole = network.Phase(steps=[2.0, 4.0, 2.0], seconds=8.0, sent=[300.0, 300.0])
    assert whole.steps_per_second(bytes_per_step=100.0) == 0.5
    part = network.Phase(steps=[], seconds=20.0, sent=[10.0, 30.0])
    assert part.steps_per_second(bytes_per_step=100.0) == pytest.approx(0.01)
