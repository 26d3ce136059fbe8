"""What trains beside or unlike plain LoRA: biases, rank-stabilised scales, adapters on a model whose head is its embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from journey import Journey, read_events
from reference import load, score
from reversing import check_run, validation_rows, write_rows, write_run
from safetensors.torch import load_file
from toys import save_toy, toy_text_config


@pytest.mark.slow
def test_biases_of_adapted_layers_and_a_layer_in_full_train_and_go_with_the_adapter(
    journey: Journey, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    def with_biases(config: object) -> LlamaForCausalLM:
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(std=0.1)
        return model

    model = save_toy(with_biases, toy_text_config("llama", attention_bias=True, mlp_bias=True), tmp_path / "model")  # type: ignore[arg-type]
    write_rows(journey)
    adapted = ["v_proj", "gate_proj", "up_proj", "down_proj"]
    lora = {"target_modules": adapted, "bias": "lora_only", "modules_to_save": "norm"}
    write_run(journey, model, lora=lora, train={"learning_rate": 2e-2})
    done = journey.shardtune("train", "run.yaml", "--nproc", 2, "-o", "train.per_device_train_batch_size=4")
    run = journey.only_run()
    check_run(journey, run, model)
    stored, trained = load_file(model / "model.safetensors"), load_file(run / "final" / "adapter_model.safetensors")
    assert f"({sum(tensor.numel() for tensor in stored.values()):,} parameters, computed in" in done.stdout
    assert "% train in full" in done.stdout and "base_model.model.model.norm.weight" in trained
    biases = {name: tensor for name, tensor in trained.items() if name.endswith(".bias")}
    assert len(biases) == 2 * len(adapted) and {name.split(".")[-3] for name in biases} == set(adapted)
    for name, tensor in biases.items():
        assert not torch.equal(tensor, stored[name.removeprefix("base_model.model.").replace(".base_layer", "")])
    assert json.loads((run / "final" / "adapter_config.json").read_text())["bias"] == "lora_only"


@pytest.mark.slow
def test_rank_stabilised_lora_is_scaled_in_plain_peft_as_it_was_in_training(journey: Journey, toy_model: Path) -> None:
    from transformers import AutoTokenizer

    write_rows(journey)
    write_run(journey, toy_model, lora={"r": 16, "use_rslora": True})
    journey.shardtune("train", "run.yaml")
    run = journey.only_run()
    found = check_run(journey, run, toy_model)
    settings = run / "final" / "adapter_config.json"
    config = json.loads(settings.read_text())
    assert config["use_rslora"] is True
    settings.write_text(json.dumps({**config, "use_rslora": False}))  # alpha/16 in place of alpha/4
    rows = validation_rows(journey, AutoTokenizer.from_pretrained(toy_model))
    assert abs(score(load(toy_model, run / "final"), rows).loss - found.loss) > 0.01


@pytest.mark.slow
def test_a_tied_head_is_left_alone_and_its_name_is_refused_as_a_target(journey: Journey, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = save_toy(LlamaForCausalLM, toy_text_config("llama", tie_word_embeddings=True), tmp_path / "model")
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    write_rows(journey)
    write_run(journey, model)
    refused = journey.shardtune("train", "run.yaml", "-o", "lora.target_modules=[q_proj, lm_head]", expect=2)
    said = " ".join(refused.stderr.split())
    assert "lm_head" in said and "modules_to_save" in said
    journey.shardtune("train", "run.yaml", "--nproc", 2, "-o", "train.per_device_train_batch_size=4")
    run = journey.only_run()
    check_run(journey, run, model)
    assert read_events(run, "run_end")[0]["status"] == "done"
    assert not [name for name in load_file(run / "final" / "adapter_model.safetensors") if "lm_head" in name]
