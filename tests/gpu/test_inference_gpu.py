"""A trained model answers on a GPU as it does on a CPU: dense, experts, FP8; with the cache as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_toys import to_fp8
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from toys import mistral4_config, save_toy, toy_text_config, toy_wrapper

from shardtune.checkpoint.adapter import write_adapter_files
from shardtune.config.schema import ModelSection
from shardtune.inference.load import load_tuned
from shardtune.inference.source import TunedModel, find_tuned
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IDS = torch.tensor([[1, 5, 9, 20, 33, 41, 7, 12]])
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "llama": (["q_proj", "down_proj"], None),
    "mixtral": (["q_proj"], EXPERTS),
    "fp8 wrapper": (["q_a_proj", "o_proj"], EXPERTS),
}


def base(kind: str, folder: Path) -> Path:
    if kind == "fp8 wrapper":
        toy_wrapper(folder, mistral4_config(moe_intermediate_size=24, hidden_size=40))
        to_fp8(folder, "blocks")
        return folder
    import transformers

    cls = {"llama": transformers.LlamaForCausalLM, "mixtral": transformers.MixtralForCausalLM}[kind]
    return save_toy(cls, toy_text_config(kind), folder)


def tuned_toy(kind: str, folder: Path) -> TunedModel:
    """A random adapter on a toy, in a folder: held as training holds it."""
    base_folder = base(kind, folder / "base")
    modules, parameters = CASES[kind]
    config = LoraConfig(
        r=8, task_type="CAUSAL_LM", base_model_name_or_path=str(base_folder), target_modules=modules,
        target_parameters=parameters,
    )  # fmt: skip
    section = ModelSection(model_name_or_path=str(base_folder))
    meta = build_meta_model(section, base_folder, read_headers(base_folder)).model
    torch.manual_seed(2)
    shapes = get_peft_model_state_dict(PeftModel(meta, config, low_cpu_mem_usage=True))
    write_adapter_files(config, {name: torch.randn(t.shape) * 0.1 for name, t in shapes.items()}, folder / "adapter")
    return find_tuned(str(folder / "adapter"))


@pytest.mark.parametrize("kind", CASES)
def test_it_computes_there_what_it_does_on_a_cpu_with_the_cache_and_without(kind: str, tmp_path: Path) -> None:
    tuned = tuned_toy(kind, tmp_path)
    logits = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        section = tuned.base.model_copy(update={"torch_dtype": dtype})
        loaded = load_tuned(replace(tuned, base=section), torch.device(device))
        ids = IDS.to(device)
        for side in (True, False):
            with torch.no_grad(), loaded.side(tuned=side) as model:
                whole = model(input_ids=ids).logits
                first = model(input_ids=ids[:, :-1], use_cache=True)
                last = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True).logits
            torch.testing.assert_close(last[:, -1], whole[:, -1], rtol=2e-2, atol=2e-2 if dtype == "bfloat16" else 1e-3)
            logits[device, dtype, side] = whole.float().cpu()
    for side in (True, False):
        wanted = logits["cpu", "float32", side]
        assert (logits["cuda", "float32", side] - wanted).norm() / wanted.norm() < 5e-3  # TF32 in grouped products
        assert (logits["cuda", "bfloat16", side] - wanted).norm() / wanted.norm() < 5e-2
    moved = logits["cpu", "float32", True] - logits["cpu", "float32", False]
    assert moved.norm() / wanted.norm() > 0.05  # else the adapter is not compared
