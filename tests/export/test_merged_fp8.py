"""An FP8 base becomes bf16 unless asked otherwise; onto FP8 only in its own layout, and only if the change survives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export.exporting import config_of, export, tensors_of
from fp8_toys import to_fp8
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from toys import mistral4_config, toy_wrapper
from tuned_toys import IDS

from shardtune.checkpoint.adapter import read_adapter, write_adapter_files
from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.export.merged_tensors import plan_merge
from shardtune.inference.source import find_tuned
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers

FORMS = ["blocks", "scalar", *(pytest.param(form, marks=pytest.mark.slow) for form in ("rows", "one"))]


def fp8_wrapper(folder: Path, form: str, size: float = 0.1) -> dict[str, torch.Tensor]:
    """A vision+text checkpoint in FP8 and an adapter on its text model; returns the true values by stored name."""
    toy_wrapper(folder / "base", mistral4_config(moe_intermediate_size=24, hidden_size=40))
    values = to_fp8(folder / "base", form, block=(16, 16) if form == "blocks" else None)
    config = LoraConfig(
        r=4, task_type="CAUSAL_LM", base_model_name_or_path=str(folder / "base"),
        target_modules=["q_a_proj", "o_proj"], target_parameters=["experts.down_proj", "experts.gate_up_proj"],
    )  # fmt: skip
    section = ModelSection(model_name_or_path=str(folder / "base"))
    meta = build_meta_model(section, folder / "base", read_headers(folder / "base")).model
    shapes = get_peft_model_state_dict(PeftModel(meta, config, low_cpu_mem_usage=True))
    torch.manual_seed(2)
    drawn = {name: torch.randn(tensor.shape) * size for name, tensor in shapes.items()}
    write_adapter_files(config, drawn, folder / "adapter")
    return values


def wrapper_logits(folder: Path) -> torch.Tensor:
    from transformers import Mistral3ForConditionalGeneration

    model, info = Mistral3ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("form", FORMS)
def test_an_fp8_wrapper_becomes_a_plain_bf16_one(form: str, tmp_path: Path) -> None:
    """Computed another way: the true values in a plain checkpoint, onto which the same adapter is merged by PEFT."""
    from safetensors.torch import save_file
    from transformers import Mistral3ForConditionalGeneration

    values = fp8_wrapper(tmp_path, form)
    done = export(tmp_path / "adapter", tmp_path / "out")
    assert done.verification.method == "logits"
    config, stored = config_of(tmp_path / "out"), tensors_of(tmp_path / "out")
    assert "quantization_config" not in config
    assert set(stored) == set(values)  # no scales of any kind
    before = tensors_of(tmp_path / "base")
    quantised = {name for name in before if before[name].dtype == torch.float8_e4m3fn}
    assert {stored[name].dtype for name in quantised} == {torch.bfloat16}
    vision = [name for name in values if not name.startswith("language_model.")]
    assert vision
    for name in vision:
        if name not in quantised:
            assert torch.equal(stored[name], before[name]), name

    plain = tmp_path / "plain"
    toy_wrapper(plain, mistral4_config(moe_intermediate_size=24, hidden_size=40))
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    whole = Mistral3ForConditionalGeneration.from_pretrained(plain, dtype=torch.float32)
    base_logits = wrapper_logits(plain)
    inner = whole.model.language_model
    config_file = tmp_path / "adapter" / "adapter_config.json"
    adapter = {n.replace("base_model.model.model.", "base_model.model."): t
               for n, t in read_adapter(tmp_path / "adapter").items()}  # fmt: skip
    (tmp_path / "inner").mkdir()
    save_file(adapter, tmp_path / "inner" / "adapter_model.safetensors")
    (tmp_path / "inner" / "adapter_config.json").write_text(
        json.dumps({**json.loads(config_file.read_text()), "task_type": None})
    )
    whole.model.language_model = PeftModel.from_pretrained(inner, str(tmp_path / "inner")).merge_and_unload()
    with torch.no_grad():
        wanted = whole(input_ids=IDS).logits
    found = wrapper_logits(tmp_path / "out")
    change = wanted - base_logits
    assert change.abs().max() > 0.01
    assert ((found - wanted).norm() / change.norm()) < 0.1  # what bf16 rounds
    assert ((found - base_logits) * change).sum() / change.square().sum() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_onto_fp8_the_layout_is_the_bases_and_the_values_are_close(form: str, tmp_path: Path) -> None:
    fp8_wrapper(tmp_path, form, size=1.0)
    done = export(tmp_path / "adapter", tmp_path / "out", dtype="fp8")
    before, after = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "out")
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}
    assert config_of(tmp_path / "out") == config_of(tmp_path / "base")
    merged = plan_merge(find_tuned(str(tmp_path / "adapter")))
    changed = {tensor.name for tensor in merged.tensors if tensor.changed}
    for name in before:
        touched = name in changed or name.removesuffix("_scale_inv") in changed
        same = torch.equal(before[name].view(-1).view(torch.uint8), after[name].view(-1).view(torch.uint8))
        assert same or touched, name
    assert done.verification.figures["surviving_delta"] > 0.95


def test_a_small_change_is_not_rounded_to_fp8(tmp_path: Path) -> None:
    fp8_wrapper(tmp_path, "blocks", size=0.01)
    with pytest.raises(UserInputError) as refused:
        export(tmp_path / "adapter", tmp_path / "out", dtype="fp8")
    assert "would undo the fine-tuning" in refused.value.what and "bf16" in refused.value.fix
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name or "export" in file.name] == []
    lowered = export(tmp_path / "adapter", tmp_path / "out", dtype="fp8", min_surviving_delta=0.0)
    assert lowered.verification.figures["surviving_delta"] < 0.9
    assert (
        "less than 90.0 % of their change in FP8" in (tmp_path / "out" / "README.md").read_text()
    )  # its users are told


def test_quantised_parts_of_the_vision_model_are_dequantised_too(tmp_path: Path) -> None:
    values = fp8_wrapper(tmp_path, "blocks")
    before = tensors_of(tmp_path / "base")
    vision = [n for n, t in before.items() if t.dtype == torch.float8_e4m3fn and not n.startswith("language_model.")]
    assert vision  # the toys quantise whatever is called a projection
    export(tmp_path / "adapter", tmp_path / "out")
    after: dict[str, Any] = tensors_of(tmp_path / "out")
    for name in vision:
        torch.testing.assert_close(after[name].float(), values[name].float(), rtol=4e-3, atol=0)
