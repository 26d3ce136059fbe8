"""`train.fp8_compute` in real runs: near the dequantised curve, the same sharded, and the run says what it came to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_toys import to_fp8
from interrupted import run
from running import Command, events
from safetensors.torch import load_file
from toys import mistral4_config, save_toy, toy_config, toy_llama

from shardtune.errors import UserInputError

RUNS = {
    "dequantised": [],
    "eager": ["train.kernels=eager"],
    "codes": ["train.fp8_compute=true"],
    "apart": ["train.fp8_compute=true", "train.fused_lora=false"],
}


@pytest.fixture(scope="module")
def config(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sequences a step."""
    from transformers import Mistral4ForCausalLM

    folder = tmp_path_factory.mktemp("fp8-compute")
    save_toy(Mistral4ForCausalLM, mistral4_config(qk_rope_head_dim=16), folder / "model")
    to_fp8(folder / "model", "scalar", None)
    lora = {"target_modules": ["attention", "mlp"], "experts": True, "expert_r": 2}
    train = {"max_steps": 6, "per_device_train_batch_size": 4}
    return toy_config(
        folder, folder / "model", toy_data, model={"base_precision": "fp8"}, lora=lora, train=train
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(config: Path) -> dict[str, Path]:
    for name, settings in RUNS.items():
        assert run(config, *settings, run_id=name) == 0
    return {name: config.parent / "runs" / name for name in RUNS}


def curve(run: Path, number: str) -> list[float]:
    return [event[number] for event in events(run, "step")]


def test_the_curve_stays_near_the_dequantised_one_and_is_not_it(runs: dict[str, Path]) -> None:
    plain, codes = (curve(runs[name], "loss") for name in ("dequantised", "codes"))
    assert len(codes) == 6 and codes == pytest.approx(plain, rel=2e-2) and codes != plain
    norms = [curve(runs[name], "grad_norm")[0] for name in ("dequantised", "codes")]
    assert norms[1] == pytest.approx(norms[0], rel=5e-2) and norms[1] != norms[0]


def test_eager_goes_expert_by_expert_to_the_same_curve(
    config: Path, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert curve(runs["eager"], "loss") == pytest.approx(curve(runs["dequantised"], "loss"), rel=1e-5)
    settled = (runs["eager"] / "config.yaml").read_text()
    assert "fused_experts: false" in settled and "fused_lora: false" in settled

    def never(*_: object) -> None:
        raise AssertionError("experts were multiplied together")

    monkeypatch.setattr("shardtune.model.experts.routed_experts", never)
    assert run(config, "train.kernels=eager", "train.max_steps=1", run_id="loops") == 0
    with pytest.raises(AssertionError, match="multiplied together"):
        run(config, "train.max_steps=1", run_id="grouped")


def assert_alike(one: Path, other: Path) -> None:
    # An activation on the edge between two codes may fall to either side when sums are taken in another order.
    assert curve(one, "loss") == pytest.approx(curve(other, "loss"), rel=5e-3)
    assert curve(one, "grad_norm")[0] == pytest.approx(curve(other, "grad_norm")[0], rel=2e-2)
    own = load_file(one / "final" / "adapter_model.safetensors")
    for name, tensor in load_file(other / "final" / "adapter_model.safetensors").items():
        assert own[name].shape == tensor.shape and torch.isfinite(own[name]).all(), name


def test_the_fused_operator_does_not_change_it(runs: dict[str, Path]) -> None:
    assert_alike(runs["apart"], runs["codes"])
    assert curve(runs["apart"], "loss") != curve(runs["dequantised"], "loss")


@pytest.mark.slow
def test_sharding_does_not_change_it(shardtune: Command, config: Path, runs: dict[str, Path]) -> None:
    result = shardtune(
        "train", config, "--nproc", 2, "--run-id", "sharded", "-o", "train.per_device_train_batch_size=2",
        "-o", "train.fp8_compute=true",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    sharded = config.parent / "runs" / "sharded"
    assert_alike(sharded, runs["codes"])
    assert curve(sharded, "loss") != curve(runs["dequantised"], "loss")


def test_the_run_says_how_many_weights_are_multiplied_and_by_what(runs: dict[str, Path]) -> None:
    (said,) = (e["text"] for e in events(runs["codes"], "notice") if e["about"] == "fp8_compute")
    assert "20 weights are multiplied as float8 codes" in said and "eager twin" in said and "dequantised" not in said
    assert not [e for e in events(runs["dequantised"], "notice") if e["about"] == "fp8_compute"]
    assert "fp8_compute: false" in (runs["dequantised"] / "config.yaml").read_text()


def test_a_base_that_is_not_held_in_fp8_is_answered(toy_data: Path, tmp_path: Path) -> None:
    config = toy_config(tmp_path, toy_llama(tmp_path / "model"), toy_data, train={"max_steps": 1, "fp8_compute": True})
    with pytest.raises(UserInputError, match="no weight is held in FP8") as refused:
        run(config)
    assert "model.base_precision: fp8" in str(refused.value.fix)
