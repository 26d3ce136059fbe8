"""The same rows on 1, 2, 3, 4 and 6 processes in every mesh: one curve, one adapter, and nothing is sent needlessly."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_toys import to_fp8
from interrupted import evaluations, lines, on_processes
from running import events
from safetensors.torch import load_file
from toys import toy_config, toy_mistral4

# (per-device batch, accumulation) that make 12 rows a step; 50 rows leave a last step of 2, fewer than most ranks
SHAPES = {1: (4, 3), 2: (2, 3), 3: (2, 2), 4: (1, 3), 6: (1, 2)}
# Meshes are written as replicas x shards.
FAST = ("2x1", "3x1", "2x2")
SLOW = ("1x2", "1x3", "1x4", "4x1", "3x2", "2x3", "1x6", "6x1")
EXPERTS = ['lora.target_modules=["attention", "mlp"]', "lora.experts=true", "lora.expert_r=2"]
# By name: settings, meshes, relative tolerance of the curve. Coarser numbers are summed in another order.
CASES: dict[str, tuple[list[str], tuple[str, ...], float]] = {
    "freed after forward": (["parallel.reshard_after_forward=true"], ("1x3", "2x2"), 2e-5),
    "bf16": (["model.torch_dtype=bfloat16"], ("3x1", "2x2"), 2e-2),
    "cast to bf16": (["train.bf16=true"], ("3x1", "2x2"), 2e-2),
    "reduced in bf16": (["parallel.reduce_dtype=bfloat16", "train.bf16=false"], ("3x1", "2x2"), 2e-2),
    "experts": (["model.model_name_or_path={experts}", *EXPERTS], ("3x1", "2x2"), 1e-4),
    "fp8": (["model.model_name_or_path={fp8}", "model.base_precision=fp8", *EXPERTS], ("3x1", "2x2"), 1e-4),
    "dora": (["lora.use_dora=true"], ("3x1", "2x2"), 2e-5),
    "saved": (['lora.modules_to_save=["norm"]', 'model.new_tokens=["w98", "w99"]'], ("3x1", "2x2"), 2e-5),
}


def size(mesh: str) -> tuple[int, int]:
    replicas, shards = map(int, mesh.split("x"))
    return replicas, shards


def overrides(mesh: str) -> list[str]:
    replicas, shards = size(mesh)
    batch, accumulation = SHAPES[replicas * shards]
    kind = "full" if replicas == 1 else "replicate" if shards == 1 else "hybrid"
    rows = [f"train.per_device_train_batch_size={batch}", f"train.gradient_accumulation_steps={accumulation}"]
    return [*rows, f"parallel.shard={kind}", *([f"parallel.shard_size={shards}"] if kind == "hybrid" else [])]


def train_all(environment: dict[str, str], config: Path, wanted: Iterable[tuple[str, str, list[str]]]) -> Path:
    """Runs by name, mesh and settings; returns their folder."""
    sessions: dict[int, list[dict[str, Any]]] = {}
    for name, mesh, settings in wanted:
        replicas, shards = size(mesh)
        session = {"run_id": f"{name} {mesh}".replace(" ", "-"), "overrides": [*overrides(mesh), *settings]}
        sessions.setdefault(replicas * shards, []).append(session)
    on_processes(environment, config, sessions, timeout=900)
    return config.parent / "runs"


def assert_as_alone(runs: Path, name: str, mesh: str, rel: float = 2e-5) -> None:
    """The first steps, one of two rows, and the next epoch: every rank's numbers, evaluations, the adapter."""
    alone, shared = (runs / f"{name} {one}".replace(" ", "-") for one in ("1x1", mesh))
    expected, (replicas, shards) = lines(alone), size(mesh)
    assert list(expected) == [1, 2, 3, 4, 5, 6] and expected[6]["epoch"] > 1
    for rank in range(replicas * shards):
        found = lines(shared, rank)
        assert list(found) == list(expected)
        for step, numbers in expected.items():
            assert numbers["grad_norm"] > 0.1  # clipped
            for key in ("loss", "grad_norm"):
                assert found[step][key] == pytest.approx(numbers[key], rel=rel), (rank, step, key)
            assert found[step]["tokens"] == numbers["tokens"]
    assert list(evaluations(alone)) == [3, 6]
    assert evaluations(shared) == pytest.approx(evaluations(alone), rel=rel)
    theirs, ours = (load_file(run / "final" / "adapter_model.safetensors") for run in (alone, shared))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (tensor.abs().sum(dim=-1) > 0).all() or "experts" in key or "tokens" in key, key
        torch.testing.assert_close(ours[key], tensor, rtol=50 * rel, atol=rel)


@pytest.fixture(scope="module")
def config(toy_model: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("meshes"), toy_model, toy_data, data={"val_split": "validation"},
        train={"max_steps": 6, "eval_steps": 3, "max_grad_norm": 0.1, "packing": False},
    )  # fmt: skip


@pytest.fixture(scope="module")
def replicas(config: Path, shared_environment: dict[str, str]) -> Path:
    return train_all(shared_environment, config, [("toy", mesh, []) for mesh in ("1x1", *FAST)])


@pytest.mark.parametrize("mesh", FAST)
def test_replicas_train_as_one_process(replicas: Path, mesh: str) -> None:
    assert_as_alone(replicas, "toy", mesh)


def test_a_rank_holds_and_sends_what_its_mesh_says(replicas: Path) -> None:
    alone = events(replicas / "toy-1x1", "plan")[0]
    total, trained = alone["sharding"]["total_bytes"], 4 * alone["adapters"]["trainable"]
    for mesh in FAST:
        copies, shards = size(mesh)
        for rank in range(copies * shards):
            run = replicas / f"toy-{mesh}"
            held = events(run, "plan", rank)[0]["sharding"]["local_bytes"]
            sent = events(run, "profile", rank)[0]["collectives"]
            if shards == 1:  # gathered and reduced once a step
                assert held < total - trained + 1.5 * trained / copies
                assert sent["shard"] < 2 * 1.5 * trained and sent["replicate"] == 0
            else:
                assert held < 1.1 * total / shards
                assert 0 < sent["replicate"] <= 1.1 * trained / shards  # 2 (R - 1) / R of its shards' gradients


@pytest.fixture(scope="module")
def others(
    replicas: Path, config: Path, shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """All other meshes, and other models and settings in some."""
    models = {name: tmp_path_factory.mktemp("models") / name for name in ("experts", "fp8")}
    for folder in models.values():
        toy_mistral4(folder, moe_intermediate_size=24, hidden_size=40)
    to_fp8(models["fp8"], "blocks")
    wanted = [("toy", mesh, []) for mesh in SLOW]
    for name, (settings, meshes, _) in CASES.items():
        wanted += [(name, mesh, [one.format(**models) for one in settings]) for mesh in ("1x1", *meshes)]
    return train_all(shared_environment, config, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SLOW)
def test_every_mesh_trains_as_one_process(others: Path, mesh: str) -> None:
    assert_as_alone(others, "toy", mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for name, case in CASES.items() for mesh in case[1]])
def test_other_models_and_settings_train_as_on_one_process(others: Path, name: str, mesh: str) -> None:
    assert_as_alone(others, name, mesh, CASES[name][2])


@pytest.mark.slow
def test_weights_that_are_cast_for_each_pass_are_not_sent_either(others: Path) -> None:
    """FSDP2 has the whole base then, in a mesh of three replicas of one rank each."""
    for rank in range(3):
        sent = events(others / "cast-to-bf16-3x1", "profile", rank)[0]["collectives"]
        assert sent["shard"] == 0 < sent["replicate"]
