"""Adapters that PEFT itself made, with random values, of each kind that it has: on toys, in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from toys import save_toy, toy_text_config

IDS = torch.tensor([[1, 5, 9, 20, 33, 41, 7, 12]])
CASES = {
    "dense": ("llama", "LlamaForCausalLM", {"target_modules": ["q_proj", "down_proj"]}),
    "rsLoRA, patterns": (
        "llama", "LlamaForCausalLM",
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"v_proj": 2},
         "alpha_pattern": {"v_proj": 5}},
    ),
    "DoRA": ("llama", "LlamaForCausalLM", {"target_modules": ["q_proj", "o_proj"], "use_dora": True}),
    "head in full": ("llama", "LlamaForCausalLM", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "biases": ("qwen2", "Qwen2ForCausalLM", {"target_modules": ["q_proj"], "bias": "all"}),
    "experts": (
        "mixtral", "MixtralForCausalLM",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "MLA and experts": (
        "mistral4", "Mistral4ForCausalLM",
        {"target_modules": ["q_a_proj", "kv_b_proj"], "target_parameters": ["experts.gate_up_proj"]},
    ),
    "new tokens": (
        "llama", "LlamaForCausalLM",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 33], "lm_head": [5, 33]}},
    ),
}  # fmt: skip


def tuned_toy(case: str, folder: Path, **changes: Any) -> PeftModel:
    """The adapted model of a case, as transformers and PEFT have it; `folder` gets `base` and `adapter`.

    Args:
        changes: Of the model's config.
    """
    kind, name, settings = CASES[case]
    return adapted_toy(kind, name, settings, folder, **changes)


def adapted_toy(kind: str, name: str, settings: dict[str, Any], folder: Path, **changes: Any) -> PeftModel:
    import transformers

    cls = getattr(transformers, name)
    save_toy(cls, toy_text_config(kind, **changes), folder / "base")
    base = cls.from_pretrained(folder / "base", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)  # as training writes it
    return model.eval()
