"""Biases that train with the adapters: in adapted layers and outside of the decoder layers, through checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interrupted import evaluations, final_weights, lines, whole_cut_and_alone
from running import events
from safetensors.torch import load_file, save_file
from toys import plain_eval_loss, save_toy, toy_config, toy_text_config

pytestmark = pytest.mark.slow
HEAD, NORM = "base_model.model.lm_head.bias", "base_model.model.model.final_layernorm.bias"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every linear layer, both norms and the head have a bias, and none is zero as a new model's are."""
    from transformers import PhiForCausalLM

    folder = save_toy(PhiForCausalLM, toy_text_config("phi"), tmp_path_factory.mktemp("phi"))
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * 0.05 if name.endswith("bias") else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def config(phi: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("biases"), phi, toy_data, data={"val_split": "validation"},
        lora={"bias": "all"},
        train={"max_steps": 6, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(config: Path, shared_environment: dict[str, str]) -> Path:
    return whole_cut_and_alone(shared_environment, config)


def test_a_checkpoint_written_after_an_evaluation_has_the_state_of_everything_that_trains(runs: Path) -> None:
    folder = runs / "cut" / "checkpoints" / "step-000004"
    adapter, state = load_file(folder / "adapter_model.safetensors"), load_file(folder / "optimizer.safetensors")
    assert {HEAD, NORM, QUERY} < set(adapter)
    assert len(state) == 3 * len(adapter)
    assert state[f"exp_avg/{HEAD}"].shape == adapter[HEAD].shape


def test_a_resumed_run_ends_with_the_same_bits(runs: Path) -> None:
    whole, cut = runs / "whole", runs / "cut"
    assert [event["step"] for event in events(cut, "resume")] == [4]
    assert lines(cut) == lines(whole) and evaluations(cut) == evaluations(whole)
    assert final_weights(cut) == final_weights(whole)


def test_one_process_computes_the_same(runs: Path) -> None:
    for number in ("loss", "grad_norm"):
        alone, shared = ([event[number] for event in events(runs / name, "step")] for name in ("alone", "whole"))
        assert shared == pytest.approx(alone, rel=2e-5)


def test_the_first_steps_prove_that_biases_train_and_the_summary_counts_them(runs: Path) -> None:
    adapter = load_file(runs / "alone" / "final" / "adapter_model.safetensors")
    (proof,) = events(runs / "alone", "proof")
    assert proof["proven"] == proof["shards"] == len(adapter)
    (plan,) = events(runs / "alone", "plan")
    assert plan["adapters"]["trainable"] == sum(tensor.numel() for tensor in adapter.values())
    outside = [name for name in adapter if name.endswith(".bias") and "base_layer" not in name]
    assert len(outside) == 2 * 5 + 2  # in each layer k_proj, dense, fc1, fc2 and the norm
    row = plan["adapters"]["rows"][-1]
    assert (row["pattern"], row["tensors"]) == ("biases of other layers", len(outside))
    assert sum(row["parameters"] for row in plan["adapters"]["rows"]) == plan["adapters"]["trainable"]


def test_plain_peft_gives_the_adapter_its_biases_and_reaches_the_reported_loss(
    runs: Path, phi: Path, toy_data: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(phi, dtype=torch.float32), runs / "whole" / "final"
    ).eval()
    stored = load_file(phi / "model.safetensors")["lm_head.bias"]
    assert not torch.equal(model.base_model.model.lm_head.bias, stored)
    tokenizer = AutoTokenizer.from_pretrained(phi)
    assert plain_eval_loss(model, tokenizer, toy_data) == pytest.approx(
        events(runs / "whole", "eval")[-1]["loss"], rel=1e-5
    )
