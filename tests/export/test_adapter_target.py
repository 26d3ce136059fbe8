"""An exported adapter is plain PEFT: it loads without shardtune, and names nothing of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from export.exporting import export
from export.test_merged import logits
from export.test_merged_fp8 import fp8_wrapper
from peft import PeftModel
from safetensors.torch import load_file
from tuned_toys import CASES, tuned_toy

from shardtune.checkpoint.adapter import read_adapter
from shardtune.errors import UserInputError


@pytest.mark.parametrize("case", CASES)
def test_plain_peft_loads_it(case: str, tmp_path: Path) -> None:
    peft = tuned_toy(case, tmp_path)
    done = export(tmp_path / "adapter", tmp_path / "out", "adapter")
    base = type(peft.base_model.model).from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    torch.testing.assert_close(logits(again), logits(peft), rtol=1e-4, atol=1e-4)
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(done.files)


def test_the_base_has_a_name_that_means_something_elsewhere(tmp_path: Path) -> None:
    tuned_toy("dense", tmp_path)

    def written(out: str, **options: str) -> str:
        done = export(tmp_path / "adapter", tmp_path / out, "adapter", **options)
        assert ("--base-name" in " ".join(done.warnings)) == ("base_name" not in options and out != "cached")
        content = json.loads((tmp_path / out / "adapter_config.json").read_text())
        return str(content["base_model_name_or_path"])

    assert written("plain") == "base"  # not a path of this machine
    assert written("named", base_name="owner/model") == "owner/model"
    assert "base_model: owner/model" in (tmp_path / "named" / "README.md").read_text()
    cache = tmp_path / "hub" / "models--some-owner--Some-Model" / "snapshots"
    cache.mkdir(parents=True)
    (tmp_path / "base").rename(cache / "abc")
    done = export(tmp_path / "adapter", tmp_path / "cached", "adapter", base=cache / "abc")
    assert "--base-name" not in " ".join(done.warnings)
    content = json.loads((tmp_path / "cached" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == "some-owner/Some-Model"


def test_a_name_that_the_hub_cannot_have_is_refused(tmp_path: Path) -> None:
    tuned_toy("dense", tmp_path)
    for name in ("not a name", "a/b/c", "./base", "owner/", ""):
        with pytest.raises(UserInputError, match="is not a name on the Hub"):
            export(tmp_path / "adapter", tmp_path / "out", "adapter", base_name=name)
    export(tmp_path / "adapter", tmp_path / "out", "adapter", base_name="gpt2")  # older ones have no owner


def test_that_of_a_wrapper_has_the_form_for_the_whole_model_beside_it(tmp_path: Path) -> None:
    from transformers import Mistral3ForConditionalGeneration

    fp8_wrapper(tmp_path, "blocks")
    export(tmp_path / "adapter", tmp_path / "out", "adapter")
    wrapped = tmp_path / "out" / "on-wrapper"
    assert len(load_file(wrapped / "adapter_model.safetensors")) == len(read_adapter(tmp_path / "out"))
    assert json.loads((wrapped / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    export(tmp_path / "adapter", tmp_path / "merged")  # whose base, in bf16, plain PEFT can load
    whole = Mistral3ForConditionalGeneration.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(whole, str(wrapped))
    found = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert found and all(".language_model." in name for name in found)
