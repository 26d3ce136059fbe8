"""Going on with several processes: the same bits on as many as before, the same curve on more or fewer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import evaluations, final_weights, lines, on_processes
from running import Command, events
from safetensors.torch import load_file
from toys import toy_config

# 12 packed rows a step on 3, 4 and 1 processes, and how the base is sharded over them
SHAPES = {3: (2, 2), 4: (1, 3), 1: (4, 3)}
MESHES = {
    3: ["parallel.shard=replicate"],
    4: ["parallel.shard=hybrid", "parallel.shard_size=2"],
    1: ["parallel.shard=auto"],
}


def overrides(nproc: int, *more: str) -> list[str]:
    per_device, accumulation = SHAPES[nproc]
    batch = f"train.per_device_train_batch_size={per_device}", f"train.gradient_accumulation_steps={accumulation}"
    return [*batch, *MESHES[nproc], *more]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("processes"), toy_model, toy_data,
        data={"val_split": "validation", "max_length": 24}, lora={"lora_dropout": 0.3},
        train={"max_steps": 8, "logging_steps": 3, "save_strategy": "steps", "save_steps": 4, "eval_steps": 4,
               "packing": True, "gradient_checkpointing": True},
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(config: Path, shared_environment: dict[str, str]) -> Path:
    """With dropout, on three replicas and on two by two processes: one run undisturbed, one stopped and broken down.
    Without, on three: one undisturbed, one stopped at step 3."""
    sessions: dict[int, list[dict[str, Any]]] = {3: [], 4: []}
    for nproc, wanted in sessions.items():
        for name, end in (("whole", {}), ("cut", {"stop_at": 2}), ("cut", {"crash_at": 5}), ("cut", {})):
            wanted.append({"run_id": f"{name}-{nproc}", "overrides": overrides(nproc), **end})
    without = overrides(3, "lora.lora_dropout=0")
    sessions[3] += [
        {"run_id": "chain-whole", "overrides": without},
        {"run_id": "chain", "overrides": without, "stop_at": 3},
    ]
    on_processes(shared_environment, config, sessions)
    return config.parent / "runs"


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [3, 4])
def test_a_mesh_goes_on_to_the_same_bits_and_only_rank_0_reads_checkpoints(runs: Path, nproc: int) -> None:
    whole, cut = runs / f"whole-{nproc}", runs / f"cut-{nproc}"
    assert [event["step"] for event in events(cut, "resume")] == [2, 4]
    for rank in range(nproc):
        assert lines(cut, rank) == lines(whole, rank)
        assert len(lines(cut, rank)) == 4  # steps 1, 3, 6, 8: the stop at 2 and the save at 4 lie between lines
    assert evaluations(cut) == evaluations(whole)
    assert final_weights(cut) == final_weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [3, 4])
def test_a_checkpoint_of_sharded_parameters_holds_every_trained_tensor_whole(runs: Path, nproc: int) -> None:
    """With activation checkpointing on: stock libraries write nothing, an empty adapter, or rank 0's slice."""
    folder = runs / f"whole-{nproc}" / "checkpoints" / "step-000008"
    adapter, state = load_file(folder / "adapter_model.safetensors"), load_file(folder / "optimizer.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in adapter.items() if ".0.self_attn.q" in name} == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 32),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (32, 4),
    }
    assert len(adapter) == 8 and len(state) == 3 * 8
    for name, tensor in adapter.items():
        assert all(row.abs().sum() > 0 for row in tensor), f"{name}: a slice was never trained"
    for name, tensor in state.items():
        if name.startswith("exp_avg_sq/"):
            assert all(row.abs().sum() > 0 for row in tensor), name
    assert {path.name for path in folder.glob("rng-*")} == {f"rng-rank{rank}.safetensors" for rank in range(nproc)}


@pytest.mark.slow
def test_another_mesh_goes_on_with_the_rows_that_were_not_seen_and_says_what_changed(
    runs: Path, config: Path, shared_environment: dict[str, str], shared_shardtune: Command
) -> None:
    """Three replicas, two by two, and one process."""
    without = "lora.lora_dropout=0"
    on_processes(
        shared_environment, config, {4: [{"run_id": "chain", "overrides": overrides(4, without), "stop_at": 5}]}
    )
    words = [word for setting in overrides(1, without) for word in ("-o", setting)]
    last = shared_shardtune("train", config, "--run-id", "chain", *words)
    assert last.returncode == 0, last.stderr
    chain, whole = lines(runs / "chain"), lines(runs / "chain-whole")
    assert list(chain) == list(whole) == [1, 3, 6, 8]
    for step, numbers in whole.items():
        for one in (chain[step], numbers):
            one.pop("epoch")  # transformers counts micro-batches, of which the last step of an epoch has fewer
        assert chain[step] == pytest.approx(numbers, rel=2e-5), step
        assert chain[step]["tokens"] == numbers["tokens"]
    assert evaluations(runs / "chain") == pytest.approx(evaluations(runs / "chain-whole"), rel=1e-5)
    final = [load_file(runs / name / "final" / "adapter_model.safetensors") for name in ("chain", "chain-whole")]
    for name, tensor in final[1].items():
        torch.testing.assert_close(final[0][name], tensor, rtol=1e-3, atol=1e-5)
    first, second = (event["changes"] for event in events(runs / "chain", "resume"))
    expected = ['parallel.shard: "replicate" → "hybrid"', "parallel.shard_size: null → 2", "processes: 3 → 4"]
    assert [text.partition(" (")[0] for text in first] == expected
    assert [line for line in last.stdout.splitlines() if line.startswith("changed ")] == [
        f"changed   {text}" for text in second
    ]
    assert second[0].startswith('parallel.shard: "hybrid" → "replicate"')


@pytest.mark.slow
def test_a_run_killed_with_kill_9_goes_on_by_itself_to_the_same_bits(
    config: Path, environment: dict[str, str], shardtune: Command, tmp_path: Path
) -> None:
    """The whole way a user takes: the same command twice, without a name."""
    words = ["train", str(config), "-o", f"train.output_dir={tmp_path / 'runs'}", "-o", "train.save_steps=1",
             "-o", "train.logging_steps=1", "-o", "train.eval_strategy=no", "-o", "train.max_steps=30"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("runs/*/checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "final").exists()
    again = shardtune(*words)
    assert again.returncode == 0, again.stderr
    assert f"resuming the unfinished run {folder.name}" in again.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]
    whole = shardtune(*words, "--resume", "never", "--run-id", "whole")
    assert whole.returncode == 0, whole.stderr
    assert lines(folder) == lines(tmp_path / "runs" / "whole")
    assert final_weights(folder) == final_weights(tmp_path / "runs" / "whole")
