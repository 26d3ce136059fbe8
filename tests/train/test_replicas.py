"""Replicas that do not hold the same weights are found: which tensor, on which rank, and whether memory or a file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import free_ports, on_ranks
from running import events
from safetensors.torch import load_file
from toys import toy_config

from shardtune.train.replicas import Difference, _fix_files, differences

WORKER = Path(__file__).parent / "replicas_worker.py"
WEIGHT = "model.layers.1.mlp.down_proj.weight"
ADAPTER = "layers.0.self_attn.q_proj.lora_A.default.weight"


def other_model(model: Path, folder: Path) -> Path:
    """A working directory whose model differs in one bit of one weight."""
    copy = Path(shutil.copytree(model, folder / "model"))
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    first, end = json.loads(content[8:header])[WEIGHT]["data_offsets"]
    content[header + (first + end) // 2] ^= 1
    file.write_bytes(content)
    return folder


def run_config(folder: Path, model: Path, data: Path) -> Path:
    """The model's path is relative: a rank may find another one there."""
    shutil.copytree(model, folder / "model")
    train = {"max_steps": 4, "per_device_train_batch_size": 1, "packing": False}
    return toy_config(folder, Path("model"), data, train=train)


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path) -> Path:
    return run_config(tmp_path, toy_model, toy_data)


def outcomes(environment: dict[str, str], config: Path, world: int, cases: dict) -> dict[str, list[dict]]:
    out = config.parent / "out"
    out.mkdir()
    ports = json.dumps(free_ports(len(cases)))
    on_ranks(environment, WORKER, world, config, ports, json.dumps(cases), out, timeout=300)
    return {
        name: [json.loads((out / f"{name}-rank{rank}.json").read_text()) for rank in range(world)] for name in cases
    }


@pytest.fixture(scope="module")
def three(
    shared_environment: dict[str, str], toy_model: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict]]]:
    """Where runs on three ranks are, and how each rank ended."""
    folder = tmp_path_factory.mktemp("three")
    replicate, often = "parallel.shard=replicate", "guards.replica_check_steps=2"
    memory, later = {"rank": 1, "name": WEIGHT, "step": 0}, {"rank": 1, "name": WEIGHT, "step": 3}
    scale = {"rank": 1, "name": f"{WEIGHT.removeprefix('model.')}_scale_inv", "step": 0}
    tokens = ["model.new_tokens=[<|x|>]", "train.learning_rate=1e-12"]
    cases = {
        "file": {"overrides": [replicate], "folders": {"2": str(other_model(toy_model, folder / "other"))}},
        "memory": {"overrides": [replicate], "flip": memory},
        "later": {"overrides": [replicate, often], "flip": later},
        "unseen": {"overrides": [replicate], "flip": later},
        "scale": {"overrides": [replicate, "model.base_precision=fp8"], "flip": scale},
        "random": {"overrides": [replicate, "model.weights=random"]},
        "tokens": {"overrides": [replicate, *tokens]},
        "tokens-sharded": {"overrides": ["parallel.shard=full", *tokens]},
    }
    return folder, outcomes(shared_environment, run_config(folder, toy_model, toy_data), 3, cases)


def test_the_odd_one_of_three_replicas_is_named(three: tuple[Path, dict[str, list[dict]]]) -> None:
    folder, ended = three
    for name in ("file", "memory", "later"):
        assert ended[name][0] == ended[name][1] == ended[name][2]  # all ranks stop together
        assert f"'{WEIGHT}'" in ended[name][0]["what"]

    said = ended["file"][0]
    assert said["kind"] == "ShardtuneError"  # a restart would read the same file
    assert said["what"].startswith("Replicas differ before the first step: rank 2 (node 2, ")
    assert "The files of the model have different values" in said["why"]
    assert "Copy the model's files to rank 2 (node 2" in said["fix"] and "rank0-broadcast" in said["fix"]
    assert events(folder / "runs" / "file", "guard")[0]["ranks"] == [2]

    said = ended["memory"][0]
    assert said["kind"] == "MachineError"
    assert said["what"].startswith("Replicas differ before the first step: rank 1 (node 1, ")
    assert "the memory of rank 1" in said["why"] and "nvidia-smi -q -d ECC" in said["fix"]

    said = ended["later"][0]
    assert said["what"].startswith("Replicas differ at step 4: rank 1 (node 1, ")
    assert "last equal at step 2" in said["fix"]
    assert ended["unseen"] == [{"kind": "done"}] * 3
    assert "the memory of rank 1 (node 1, " in ended["scale"][0]["why"]  # quantised while it was read, and read again
    assert ended["random"] == [{"kind": "done"}] * 3  # drawn alike


def test_new_tokens_start_from_the_same_rows_however_many_replicas_there_are(
    three: tuple[Path, dict[str, list[dict]]],
) -> None:
    """As the mean of all rows, of which every replica has all."""
    folder, ended = three
    assert ended["tokens"] == ended["tokens-sharded"] == [{"kind": "done"}] * 3
    rows = [
        [tensor for name, tensor in adapter.items() if "trainable_tokens_delta" in name]
        for run in ("tokens", "tokens-sharded")
        if (adapter := load_file(folder / "runs" / run / "final" / "adapter_model.safetensors"))
    ]
    assert len(rows[0]) > 0
    for replicated, sharded in zip(*rows, strict=True):
        torch.testing.assert_close(replicated, sharded)


@pytest.mark.slow
def test_one_of_two_replicas_is_named_by_its_file_and_both_for_what_no_file_has(
    environment: dict[str, str], config: Path, toy_model: Path, tmp_path: Path
) -> None:
    """Ranks 0 and 1 hold one replica, 2 and 3 the other."""
    hybrid = ["parallel.shard=hybrid", "parallel.shard_size=2", "guards.replica_check_steps=1"]
    cases = {
        "healthy": {"overrides": hybrid},
        "memory": {"overrides": hybrid, "flip": {"rank": 3, "name": WEIGHT, "step": 0}},
        "drift": {"overrides": hybrid, "flip": {"rank": 2, "name": ADAPTER, "step": 2}},
        "file": {"overrides": hybrid, "folders": {"1": str(other_model(toy_model, tmp_path / "other"))}},
    }
    ended = outcomes(environment, config, 4, cases)
    assert ended["healthy"] == [{"kind": "done"}] * 4
    said = ended["memory"][0]
    assert "rank 3 (node 3, " in said["what"] and "rank 1" not in said["what"]
    said = ended["drift"][2]
    assert said["kind"] == "MachineError" and ADAPTER in said["what"] and "at step 2" in said["what"]
    assert "rank 0 (node 0, " in said["what"] and "rank 2 (node 2, " in said["what"]
    said = ended["file"][0]
    assert said["kind"] == "ShardtuneError"
    assert "rank 1 (node 1, " in said["what"] and "rank 3 (node 3, " in said["what"]


@pytest.mark.slow
def test_a_node_with_a_damaged_file_is_named_before_the_first_step(
    environment: dict[str, str], config: Path, toy_model: Path, tmp_path: Path
) -> None:
    """Three nodes with folders of their own; a restart is not tried, because it would read the same file."""
    folders = [config.parent, tmp_path / "second", other_model(toy_model, tmp_path / "third")]
    shutil.copytree(toy_model, tmp_path / "second" / "model")
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "shardtune", "train", str(config), "--nnodes", "3", "--nproc", "1", "--run-id", "r",
             "--master-addr", "127.0.0.1", "--master-port", str(port), "--max-restarts", "1",
             "-o", "parallel.shard=replicate"]  # fmt: skip
    nodes = [
        subprocess.Popen(
            [*words, "--node-rank", str(rank)], cwd=folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank, folder in enumerate(folders)
    ]  # fmt: skip
    try:
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [1, 1, 1], outputs
    said = " ".join(outputs[0].split())
    assert "Replicas differ before the first step: rank 2 (node 2, " in said and WEIGHT in said
    assert "restarting" not in said and "Traceback" not in said


def test_a_majority_says_who_is_odd_and_half_does_not() -> None:
    sums = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 5, "b": 1}, {"a": 1, "b": 2}]
    assert differences([[0, 1, 2, 3]], sums) == [
        Difference("a", (0, 1, 2, 3), (2,)),
        Difference("b", (0, 1, 2, 3), (0, 1, 2, 3)),
    ]
    assert differences([[0, 2], [1, 3]], sums) == [Difference("a", (0, 2), (0, 2))]


@pytest.mark.parametrize(("odd", "spreads"), [((1,), False), ((0,), True), ((0, 1), True)])
def test_a_damaged_file_of_rank_0_is_never_to_be_sent_to_all(odd: tuple[int, ...], spreads: bool) -> None:
    ranks = (0, 1) if len(odd) == 2 else (0, 1, 2)
    fix = _fix_files(Difference("w", ranks, odd), ["node 0, a", "node 1, b", "node 2, c"])
    assert ("rank0-broadcast" not in fix) is spreads
    assert all(f"rank {rank}" in fix for rank in odd)
