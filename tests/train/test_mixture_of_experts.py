"""The whole path for a model like Mistral Small 4: an FP8 wrapper, LoRA on attention, shared and routed experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_toys import to_fp8
from running import Command, events
from safetensors.torch import load_file
from toys import mistral4_config, toy_config, toy_wrapper

# (processes, per-device batch, base precision): the same six sequences a step
RUNS = {"alone": (1, 6, "fp8"), "sharded": (3, 2, "fp8"), "multiplied out": (2, 3, "bf16")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe-model")
    toy_wrapper(folder, mistral4_config(moe_intermediate_size=24, hidden_size=40))
    to_fp8(folder, "blocks")
    return folder


@pytest.fixture(scope="module")
def runs(
    shared_shardtune: Command, model: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("moe")
    lora = {"target_modules": ["attention", "mlp"], "experts": True, "expert_r": 2}
    config = toy_config(folder, model, toy_data, lora=lora, train={"max_steps": 6})
    for name, (nproc, batch, precision) in RUNS.items():
        result = shared_shardtune(
            "train", config, "--nproc", nproc, "--run-id", name.replace(" ", "-"),
            "-o", f"train.per_device_train_batch_size={batch}", "-o", f"model.base_precision={precision}",
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
    return {name: folder / "runs" / name.replace(" ", "-") for name in RUNS}


@pytest.mark.slow
@pytest.mark.parametrize("other", ["sharded", "multiplied out"])
def test_neither_sharding_nor_float8_changes_the_curve(runs: dict[str, Path], other: str) -> None:
    for number in ("loss", "grad_norm"):
        alone = [event[number] for event in events(runs["alone"], "step")]
        assert [event[number] for event in events(runs[other], "step")] == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_the_adapters_end_up_the_same(runs: dict[str, Path]) -> None:
    adapters = {name: load_file(run / "final" / "adapter_model.safetensors") for name, run in runs.items()}
    alone = adapters.pop("alone")
    assert any(".mlp.experts." in name for name in alone)
    for other in adapters.values():
        assert other.keys() == alone.keys()
        for name, tensor in alone.items():
            assert torch.allclose(other[name], tensor, rtol=1e-3, atol=2e-4), name


@pytest.mark.slow
def test_a_run_says_what_it_held_and_read(runs: dict[str, Path]) -> None:
    kept = events(runs["alone"], "weights")[0]
    opened = [events(runs["multiplied out"], "weights", rank)[0] for rank in range(2)]
    assert kept["strategy"] == "read-all"
    assert kept["local_bytes"] < 0.5 * sum(rank["local_bytes"] for rank in opened)
    plan = events(runs["alone"], "plan")[0]["adapters"]
    assert plan["base"] == events(runs["multiplied out"], "plan")[0]["adapters"]["base"]  # scales are not parameters


def test_auto_says_which_precision_it_chose_and_why(
    shardtune: Command, model: Path, toy_data: Path, tmp_path: Path
) -> None:
    result = shardtune("train", toy_config(tmp_path, model, toy_data, train={"max_steps": 1}))
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    said = next(line for line in (run / "config.yaml").read_text().splitlines() if "base_precision" in line)
    assert "base_precision: bf16" in said
    assert "auto: it fits: about" in said and "fp8 would fit as well" in said
