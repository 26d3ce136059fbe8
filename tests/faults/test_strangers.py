"""Programs that are no nodes of the run talk to the master's port: they learn nothing, change nothing, and cost nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.cluster import Cluster, environment_of_tests
from running import Command
from toys import toy_config

from shardtune.launch.coordinator import Directive

BOUND = 120
TORCH_STORE = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=3))
for _ in range(30):
    store.set("word/0", sys.argv[2])
    print("SET", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with Cluster(2, namespaces=False) as cluster:
        cluster.environment = environment_of_tests()
        yield cluster


def test_a_stranger_with_a_torch_store_cannot_end_the_run(pair: Cluster) -> None:
    pair.start_all_toys(env={"TOY_STEPS": "200"})
    pair.wait_for_step(5, ranks=2)
    stranger = subprocess.run(
        [sys.executable, "-c", TORCH_STORE, str(pair.port), Directive("end", code=0).to_json()],
        env=pair.environment, capture_output=True, text=True, timeout=BOUND,
    )  # fmt: skip
    assert stranger.returncode != 0 and "SET" not in stranger.stdout
    assert [pair.ended(node, BOUND) for node in range(2)] == [0, 0]
    assert {(pair.folder / "run" / f"total-{rank}").read_text() for rank in range(2)} == {"600.0"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_whose_masters_port_is_mute_ends_on_one_signal(pair: Cluster, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", pair.port)):
        pair.start_toy(1)
        node = pair.machines[1]
        pair.wait(lambda: "it is not a shardtune master" in node.said(), BOUND, "the word about the listener")
        began = time.monotonic()
        os.kill(node.process.pid, number)
        assert pair.ended(1, BOUND) == (75 if number == signal.SIGTERM else 130)
        assert time.monotonic() - began < 20, "at once, with room for a busy machine"
    assert "Traceback" not in node.said()


def test_a_node_whose_masters_port_is_mute_gives_up_in_time(pair: Cluster) -> None:
    with socket.create_server(("127.0.0.1", pair.port)):
        pair.start_toy(1, join_timeout_minutes=0.02)
        assert pair.ended(1, BOUND) == 2
    said = pair.machines[1].said()
    assert f"error: Could not connect to the master 127.0.0.1:{pair.port} within" in said and "  fix: " in said
    assert "why: Something is listening on" in said and "Traceback" not in said


def test_a_node_with_another_secret_ends_and_the_master_waits_for_the_right_one(pair: Cluster) -> None:
    steps = {"TOY_STEPS": "20"}
    pair.start_toy(0, env=steps)
    pair.start_toy(1, env={**steps, "SHARDTUNE_SECRET": "the secret of another cluster"})
    assert pair.ended(1, BOUND) == 2
    assert "SHARDTUNE_SECRET on this node differs from that of the master" in pair.machines[1].said()
    pair.start_toy(1, env=steps)
    assert [pair.ended(node, BOUND) for node in range(2)] == [0, 0]
    assert pair.machines[0].said().count("does not know the shared secret") == 1


NODE = """
import os, sys, threading
from shardtune.config.schema import RunConfig
from shardtune.launch.launcher import launch
from shardtune.launch.process_role import Node
config = RunConfig.model_validate({"model": {"model_name_or_path": "m"}, "data": {"dataset_name_or_path": "d"}})
nnodes, rank, port = map(int, sys.argv[1:])
code = launch(["/usr/bin/env"], Node(nnodes, rank, "127.0.0.1", port), 1, config, os.environ)
print("THREADS", [thread.name for thread in threading.enumerate()], flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_launcher_leaves_no_thread_to_the_interpreters_end_and_no_secret_to_its_ranks(
    pair: Cluster, nnodes: int
) -> None:
    for machine in pair.machines[:nnodes]:
        words = [sys.executable, "-c", NODE, nnodes, machine.number, pair.port if nnodes > 1 else 0]
        machine.start(list(map(str, words)), pair.environment)
    assert [pair.ended(node, BOUND) for node in range(nnodes)] == [0] * nnodes
    for machine in pair.machines[:nnodes]:
        assert "THREADS ['MainThread']" in machine.said() and "terminate called" not in machine.said()
        assert f"RANK={machine.number}\n" in machine.said(), "the environment of the rank"
        assert pair.environment["SHARDTUNE_SECRET"] not in machine.said()


@pytest.mark.slow
def test_a_node_on_a_network_starts_with_a_secret_or_says_that_it_has_none(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data, parallel={"join_timeout_minutes": 0.01})
    words = ("train", config, "--nnodes", 2, "--node-rank", 1, "--master-addr", "no-such-host.invalid")
    refused = shardtune(*words)
    assert refused.returncode == 2 and "SHARDTUNE_SECRET is not set" in refused.stderr
    for allowed in (
        shardtune(*words, "--insecure-network"),
        shardtune(*words, env={"SHARDTUNE_INSECURE_NETWORK": "1"}),
    ):
        assert allowed.returncode == 2 and "Could not connect to the master" in allowed.stderr
        assert "insecure network: anyone who can connect" in allowed.stdout
    secret = "a secret that nobody may read"
    safe = shardtune(*words, env={"SHARDTUNE_SECRET": secret})
    assert "Could not connect to the master" in safe.stderr and "insecure" not in safe.stdout
    assert secret not in safe.stdout + safe.stderr


def test_ranks_that_join_when_the_master_is_lost_are_ended_and_the_master_is_named(pair: Cluster) -> None:
    pair.start_all_toys()
    node = pair.machines[1]

    def has_a_rank() -> bool:
        return any(b"toy_worker" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in node.pids())

    pair.wait(has_a_rank, BOUND, "the start of a rank on node 1")
    pair.machines[0].kill()
    assert pair.ended(1, BOUND) == 69
    assert node.said().count("error: ") == 1 and "Lost the connection to the master (node 0, 127.0.0.1:" in node.said()
    assert "Traceback" not in node.said()
