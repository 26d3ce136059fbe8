"""A decoder layer's class copied from another model's accelerate file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from resolving import resolved_for
from toys import toy_text_config
from transformers import AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel

from shardtune.config import ResolvedConfig, load_config
from shardtune.errors import UserInputError
from shardtune.parallel.shard import decoder_layers


def resolved(folder: Path, classes: str) -> ResolvedConfig:
    (folder / "fsdp.yaml").write_text(
        f"distributed_type: FSDP\nfsdp_config: {{fsdp_transformer_layer_cls_to_wrap: {classes}}}\n"
    )
    (folder / "run.yaml").write_text("model: {model_name_or_path: m}\ndata: {dataset_name_or_path: d}\n")
    return load_config(folder / "run.yaml", accelerate_config=folder / "fsdp.yaml", environ={})


def toy(model_type: str) -> PreTrainedModel:
    config = toy_text_config(model_type)
    with torch.device("meta"):
        return Mistral4ForCausalLM(config) if model_type == "mistral4" else AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "written", "meant"),
    [
        ("mistral4", "MistralDecoderLayer", "Mistral4DecoderLayer"),
        ("mistral4", "LlamaDecoderLayer", "Mistral4DecoderLayer"),
        ("llama", "MistralDecoderLayer", "LlamaDecoderLayer"),
        ("llama", "BertLayer", "LlamaDecoderLayer"),
        ("qwen2", "LlamaDecoderLayer", "Qwen2DecoderLayer"),  # whether or not it has a family file
        ("llama", "[MistralDecoderLayer, LlamaDecoderLayer]", "LlamaDecoderLayer"),
    ],
)
def test_it_means_the_decoder_layer_of_this_model_and_that_is_said(
    tmp_path: Path, model_type: str, written: str, meant: str
) -> None:
    model = toy(model_type)
    after = resolved_for(resolved(tmp_path, written), model)
    assert after.config.parallel.transformer_layer_cls_to_wrap == meant
    assert after.reason("parallel.transformer_layer_cls_to_wrap") is not None
    copied = written.strip("[]").split(",")[0]
    (notice,) = (notice.text for notice in after.notices if notice.about == "sharding")
    assert f"{copied} is read as {meant}" in notice and "fsdp.yaml" in notice
    assert len(decoder_layers(model, after.config.parallel.transformer_layer_cls_to_wrap)) == 2


def test_a_class_of_this_model_stays(tmp_path: Path) -> None:
    after = resolved_for(resolved(tmp_path, "LlamaMLP"), toy("llama"))
    assert after.config.parallel.transformer_layer_cls_to_wrap == "LlamaMLP"
    assert after.reason("parallel.transformer_layer_cls_to_wrap") is None and after.notices == ()


def test_a_class_that_is_no_decoder_layer_anywhere_is_refused_with_the_key_and_the_class_to_write(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserInputError, match="no module of class MyBlock") as caught:
        resolved_for(resolved(tmp_path, "MyBlock"), toy("llama"))
    assert "fsdp.yaml" in caught.value.what and "fsdp_transformer_layer_cls_to_wrap" in caught.value.what
    assert "LlamaDecoderLayer" in caught.value.fix


def test_what_a_model_without_a_known_decoder_layer_has_is_told_without_the_adapters_modules() -> None:
    model = toy("llama")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UserInputError) as caught:
        decoder_layers(model, "MyBlock")
    assert "LlamaDecoderLayer (×2)" in caught.value.why and "ModuleDict" not in caught.value.why
