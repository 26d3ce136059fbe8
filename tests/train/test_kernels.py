"""The fast path of a run and its eager twin: the same curve, and the run says which code it took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import Command, events
from safetensors.torch import load_file
from toys import save_toy, toy_config, toy_llama, toy_text_config

from shardtune.train.fused_loss import why_not

RUNS = {
    "eager": ["train.kernels=eager"],
    "fast": [],
    "lora-only": ["train.fused_loss=false"],
    "loss-only": ["train.fused_lora=false"],
    "compiled": ["train.compile=true"],
}


@pytest.fixture(scope="module")
def runs(shardtune: Command, toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kernels")
    model = toy_llama(folder / "model")
    config = toy_config(folder, model, toy_data, train={"max_steps": 8, "logging_steps": 1})
    for name, overrides in RUNS.items():
        words = [word for override in overrides for word in ("-o", override)]
        result = shardtune("train", config, "--run-id", name, *words)
        assert result.returncode == 0, result.stdout + result.stderr
    return {name: folder / "runs" / name for name in RUNS}


@pytest.mark.parametrize("other", [name for name in RUNS if name != "eager"])
def test_every_kernel_gives_the_curve_of_its_twin(runs: dict[str, Path], other: str) -> None:
    for number in ("loss", "grad_norm", "learning_rate", "tokens"):
        meant = [event[number] for event in events(runs["eager"], "step")]
        assert len(meant) == 8 and [event[number] for event in events(runs[other], "step")] == pytest.approx(
            meant, rel=1e-5
        )
    own = load_file(runs[other] / "final" / "adapter_model.safetensors")
    for name, tensor in load_file(runs["eager"] / "final" / "adapter_model.safetensors").items():
        assert torch.allclose(own[name], tensor, rtol=1e-3, atol=1e-5), name


def test_the_saved_config_tells_which_code_ran_and_why(runs: dict[str, Path]) -> None:
    fast, eager = ((runs[name] / "config.yaml").read_text() for name in ("fast", "eager"))
    assert "fused_lora: true" in fast and "fused_loss: true" in fast and "compile: false" in fast
    assert "compiling pays on a GPU" in fast
    assert "fused_lora: false" in eager and "train.kernels is eager" in eager


def test_a_model_with_something_between_head_and_loss_keeps_its_own_loss(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    capped = AutoModelForCausalLM.from_config(toy_text_config("gemma3_text", final_logit_softcapping=30.0))
    for model in (plain, capped):
        model.requires_grad_(False)
    assert why_not(plain) is None
    assert "final_logit_softcapping" in str(why_not(capped))
    plain.lm_head.requires_grad_(True)
    assert "trained" in str(why_not(plain))


def test_asking_for_a_fused_loss_that_cannot_be_is_answered(shardtune: Command, toy_data: Path, tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM

    model = save_toy(
        Gemma3ForCausalLM, toy_text_config("gemma3_text", final_logit_softcapping=30.0), tmp_path / "model"
    )
    config = toy_config(tmp_path, model, toy_data, train={"max_steps": 1})
    refused = shardtune("train", config, "-o", "train.fused_loss=true")
    assert refused.returncode == 2 and "final_logit_softcapping" in refused.stderr
    assert shardtune("train", config, "--run-id", "auto").returncode == 0
