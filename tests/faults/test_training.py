"""A real run on three nodes: the same losses as on one, and stopped by a signal to one of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from faults.cluster import Cluster, environment_of_tests
from running import Command, events
from toys import toy_config

pytestmark = pytest.mark.slow


def start(cluster: Cluster, config: Path, *more: str) -> None:
    for machine in cluster.machines:
        words = ["train", config, "--nnodes", 3, "--node-rank", machine.number, "--master-addr", cluster.address,
                 "--master-port", cluster.port, "--nproc", 1, *more]  # fmt: skip
        environment = {**environment_of_tests(), "HF_HOME": str(cluster.folder / "hf"), "OMP_NUM_THREADS": "1"}
        machine.start([sys.executable, "-m", "shardtune", *map(str, words)], environment)


def test_three_nodes_learn_what_one_learns(
    networked: Cluster, shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    losses = {}
    for name in ("one", "three"):
        folder = tmp_path / name
        folder.mkdir()
        config = toy_config(folder, toy_model, toy_data, train={"max_steps": 3})
        if name == "one":
            done = shardtune("train", config, "--nproc", 3, "--run-id", "r", timeout=600)
            assert done.returncode == 0, done.stderr
        else:
            start(networked, config, "--run-id", "r")
            assert [networked.ended(node, 600) for node in range(3)] == [0, 0, 0]
        losses[name] = [event["loss"] for event in events(folder / "runs" / "r", "step")]
    assert len(losses["one"]) == 3 and losses["three"] == pytest.approx(losses["one"], rel=1e-6)
    assert "node 2 of 3, master 10.77.0.1:29500" in networked.machines[2].said()
    final = [tmp_path / name / "runs" / "r" / "final" / "adapter_model.safetensors" for name in ("one", "three")]
    assert final[0].stat().st_size == final[1].stat().st_size


def test_a_signal_to_one_node_saves_and_stops_all(
    networked: Cluster, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data, train={"max_steps": 100000})
    start(networked, config, "--run-id", "r")
    log = tmp_path / "runs" / "r" / "events-rank0.jsonl"
    networked.wait(lambda: log.exists() and '"event": "step"' in log.read_text(), 240, "a first step")
    os.kill(networked.machines[2].process.pid, signal.SIGTERM)
    assert [networked.ended(node, 120) for node in range(3)] == [75, 75, 75]
    (checkpoint,) = (tmp_path / "runs" / "r" / "checkpoints").glob("step-*")
    ends = [json.loads(line) for line in log.read_text().splitlines() if '"run_end"' in line]
    assert ends[0]["status"] == "stopped" and checkpoint.name == f"step-{ends[0]['step']:06d}"
