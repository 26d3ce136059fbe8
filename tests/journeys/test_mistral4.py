"""Mistral Small 4 as it is released, in miniature: a vision+text wrapper in FP8, and the names everyone copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_toys import to_fp8
from journey import Journey, read_events
from reference import load, score
from reversing import check_run, validation_rows, write_rows, write_run
from toys import mistral4_config, toy_mixtral, toy_wrapper

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FSDP = """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: MistralDecoderLayer
"""


@pytest.fixture
def wrapper(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint, and the values its codes and scales stand for."""
    folder = tmp_path / "mistral-small-4"
    toy_wrapper(folder, mistral4_config(moe_intermediate_size=24, hidden_size=40))
    return folder, to_fp8(folder, "blocks")


def plain_text_model(folder: Path, values: dict[str, torch.Tensor]) -> Any:
    """The text model alone, its weights multiplied out by hand."""
    from transformers import AutoConfig, Mistral4ForCausalLM

    config = AutoConfig.from_pretrained(folder).text_config
    model = Mistral4ForCausalLM(config).float()
    own = {name.removeprefix("language_model."): value for name, value in values.items() if "language_model." in name}
    model.load_state_dict(own)
    return model


def plain_wrapper(folder: Path, values: dict[str, torch.Tensor]) -> Any:
    """The whole wrapper, as a server would hold it, its weights multiplied out by hand."""
    from transformers import AutoConfig, Mistral3ForConditionalGeneration

    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    model = Mistral3ForConditionalGeneration(config).float()
    names = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head.")
        .replace("vision_tower.", "model.vision_tower.")
        .replace("multi_modal_projector.", "model.multi_modal_projector."): value
        for name, value in values.items()
    }
    model.load_state_dict(names)
    return model


@pytest.mark.slow
def test_the_fp8_wrapper_with_the_classic_seven_names_and_a_copied_fsdp_file(
    journey: Journey, wrapper: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    from peft import PeftModel
    from transformers import AutoTokenizer

    folder, values = wrapper
    write_rows(journey)
    write_run(
        journey, folder, model={"base_precision": "fp8"}, lora={"target_modules": SEVEN},
        train={"per_device_train_batch_size": 4, "learning_rate": 2e-2},
    )  # fmt: skip
    (journey.folder / "fsdp.yaml").write_text(FSDP)
    done = journey.shardtune("train", "run.yaml", "--accelerate-config", "fsdp.yaml")
    said = " ".join(done.stdout.split())
    assert "MistralDecoderLayer is read as Mistral4DecoderLayer" in said
    run = journey.only_run()
    plain = check_run(journey, run, folder, base=plain_text_model(folder, values))
    # k_proj, v_proj and q_proj mean the pairs of MLA; the routed experts are untouched unless asked for.
    adapted = json.loads((run / "final" / "adapter_config.json").read_text())["target_modules"]
    assert {name.rpartition(".")[2] for name in adapted} == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    served = PeftModel.from_pretrained(plain_wrapper(folder, values), run / "final" / "on-wrapper").eval()
    rows = validation_rows(journey, AutoTokenizer.from_pretrained(folder))
    assert score(served, rows).loss == pytest.approx(plain.loss, abs=1e-5)


@pytest.mark.slow
def test_adapters_on_routed_experts_are_plain_peft_adapters(journey: Journey, tmp_path: Path) -> None:
    model = toy_mixtral(tmp_path / "mixtral")
    write_rows(journey)
    write_run(
        journey, model, lora={"target_modules": ["attention", "experts"], "expert_r": 2},
        train={"per_device_train_batch_size": 4, "learning_rate": 2e-2},
    )  # fmt: skip
    journey.shardtune("train", "run.yaml", "--nproc", 2)
    run = journey.only_run()
    check_run(journey, run, model)
    adapter = load(model, run / "final")
    experts = {name for name, _ in adapter.named_parameters() if ".experts." in name and "lora_" in name}
    assert len(experts) == 2 * 2 * 2  # layers × (gate_up, down) × (A, B)
    assert read_events(run, "plan")[0]["adapters"]
