"""An adapter trained on the text model serves on the vision+text model it came out of, and touches nothing else there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from running import Command
from toys import toy_config, toy_wrapper
from transformers import Mistral3ForConditionalGeneration

from shardtune.checkpoint.wrapper import FOLDER
from shardtune.config.schema import ModelSection
from shardtune.model.load import load_model

LORA = {"target_modules": ["attention", "mlp", "router"], "experts": True, "expert_r": 2, "r": 4, "lora_dropout": 0.0}


@pytest.fixture(scope="module")
def trained(shared_shardtune: Command, toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wrapper's folder, and `final/` of a run on it."""
    folder = tmp_path_factory.mktemp("wrapper-run")
    toy_wrapper(folder / "model")
    config = toy_config(folder, folder / "model", toy_data, lora=LORA)
    result = shared_shardtune("train", config, "--nproc", 2)
    assert result.returncode == 0, result.stderr
    (run,) = (folder / "runs").iterdir()
    return folder / "model", run / "final"


def test_the_served_wrapper_computes_what_the_trained_text_model_does(trained: tuple[Path, Path]) -> None:
    model_folder, final = trained
    ids = torch.arange(11, 51).view(2, 20)
    text = load_model(ModelSection(model_name_or_path=str(model_folder), torch_dtype="float32"))
    wrapped = Mistral3ForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        untrained = wrapped(input_ids=ids).logits
        torch.testing.assert_close(text(ids).logits, untrained, rtol=1e-5, atol=1e-5)
        expected = PeftModel.from_pretrained(text, final)(input_ids=ids).logits
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            served = PeftModel.from_pretrained(wrapped, final / FOLDER)
        found = served(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - untrained).abs().max() > 1e-3
    adapted = [name for name, module in served.named_modules() if isinstance(module, LoraLayer)]
    assert adapted
    assert all(".language_model." in name for name in adapted)


def test_the_mapping_of_names_is_written_and_is_what_peft_needs(trained: tuple[Path, Path]) -> None:
    _, final = trained
    about = json.loads((final / FOLDER / "key_mapping.json").read_text())
    assert about["wrapper"] == "Mistral3ForConditionalGeneration"
    from safetensors import safe_open

    names = {}
    for key, folder in (("text", final), ("wrapper", final / FOLDER)):
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            names[key] = set(file.keys())
    import re

    (pattern, replacement) = next(iter(about["key_mapping"].items()))
    assert {re.sub(pattern, replacement, name) for name in names["text"]} == names["wrapper"]
