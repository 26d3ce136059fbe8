"""DoRA's magnitudes and layers that train in full: sharded as alone, through checkpoints, and what plain PEFT computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import run_on_ranks
from running import events
from safetensors.torch import load_file
from toys import plain_eval_loss, save_toy, toy_config, toy_text_config

LORA: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
    "in-full": {"target_modules": "attention", "modules_to_save": ["embed_tokens", "lm_head", "norm", "input_layernorm"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaForCausalLM

    config = toy_text_config("llama", tie_word_embeddings=False)
    return save_toy(LlamaForCausalLM, config, tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module", params=list(LORA))
def runs(
    request: pytest.FixtureRequest,
    untied: Path,
    toy_data: Path,
    shared_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """One run alone, and one on two processes that ends after step 2 and goes on."""
    config = toy_config(
        tmp_path_factory.mktemp(request.param), untied, toy_data, data={"val_split": "validation"},
        lora=LORA[request.param],
        train={"max_steps": 4, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
    )  # fmt: skip
    alone, two = (["train.per_device_train_batch_size=" + rows] for rows in "42")
    crash = [{"run_id": "two", "overrides": two, "crash_at": 2}, {"run_id": "two", "overrides": two}]
    run_on_ranks(shared_environment, config, {1: [{"run_id": "alone", "overrides": alone}], 2: crash})
    return config.parent / "runs"


@pytest.mark.slow
def test_two_processes_train_as_one_does_through_a_crash_and_plain_peft_reaches_the_last_loss(
    runs: Path, untied: Path, toy_data: Path
) -> None:
    assert [event["step"] for event in events(runs / "two", "resume")] == [2]
    alone, shared = ([event["loss"] for event in events(runs / name, "step")] for name in ("alone", "two"))
    assert shared == pytest.approx(alone, rel=2e-5)
    one, two = (load_file(runs / name / "final" / "adapter_model.safetensors") for name in ("alone", "two"))
    assert one.keys() == two.keys() and all((one[name] - two[name]).abs().max() < 1e-5 for name in one)
    (proof,) = events(runs / "alone", "proof")
    assert proof["proven"] == proof["shards"] == len(one)
    (plan,) = events(runs / "alone", "plan")
    assert plan["adapters"]["trainable"] == sum(tensor.numel() for tensor in one.values())
    said = events(runs / "two", "eval")[-1]["loss"]
    assert plain_loss(untied, runs / "two" / "final", toy_data) == pytest.approx(said, rel=1e-5)


@pytest.mark.slow
def test_what_trains_begins_as_the_model_has_it(runs: Path, untied: Path) -> None:
    """A few steps away from the norms of the rows, or from the weights."""
    base = load_file(untied / "model.safetensors")
    trained = load_file(runs / "two" / "final" / "adapter_model.safetensors")
    outer = "base_model.model."
    magnitude = trained.get(f"{outer}model.layers.0.mlp.up_proj.lora_magnitude_vector")
    if magnitude is not None:
        moved = magnitude - torch.linalg.norm(base["model.layers.0.mlp.up_proj.weight"], dim=1)
    else:
        names = [f"{outer}{name}" for name in base if name.startswith(("lm_head", "model.embed", "model.norm"))]
        assert {*names, f"{outer}model.layers.1.input_layernorm.weight"} < set(trained)
        moved = trained[f"{outer}lm_head.weight"] - base["lm_head.weight"]
    assert 1e-4 < moved.abs().max() < 0.1


def plain_loss(model_folder: Path, adapter: Path, data: Path) -> float:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    return plain_eval_loss(model, tokenizer, data)
