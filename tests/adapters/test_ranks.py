"""Adapters of different sizes and in some layers only, under the names PEFT's LoraConfig has for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toys import toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.adapters.lora import add_lora
from shardtune.adapters.peft_form import adapted_ranks
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError


def toy(kind: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(toy_text_config(kind, **changes))


def section(**lora: Any) -> LoraSection:
    return LoraSection(
        **{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"], **lora}
    )


@pytest.mark.parametrize(
    "lora",
    [
        {"rank_pattern": {"down_proj": 8}},
        {"rank_pattern": {"layers.1.mlp.down_proj": 2, "down_proj": 6}, "alpha_pattern": {"q_proj": 3.0}},
        {"rank_pattern": {r"layers\.\d\.self_attn\..*": 1}, "use_rslora": True},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 2, "rank_pattern": {"q_proj": 2}},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"exclude_modules": r".*\.0\..*"},
    ],
    ids=str,
)
def test_ranks_scales_and_layers_are_those_that_peft_gives_the_same_settings(lora: dict[str, Any]) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **lora)
    meant = get_peft_model(toy(num_hidden_layers=12), config)
    ours, coverage, _ = add_lora(toy(num_hidden_layers=12), section(**lora))
    assert adapted_ranks(ours) == adapted_ranks(meant)
    assert coverage.trainable == sum(p.numel() for p in meant.parameters() if p.requires_grad)


def test_a_pattern_counts_before_the_rank_of_experts() -> None:
    lora = section(
        target_modules=["mlp"], experts=True, expert_r=2, rank_pattern={r"layers\.0\.mlp\.experts\.down_proj": 3}
    )
    ours, _, _ = add_lora(toy("mixtral"), lora)
    ranks = {name: rank for name, (rank, _) in adapted_ranks(ours).items() if ".experts." in name}
    assert ranks["model.layers.0.mlp.experts.down_proj"] == 3
    assert set(ranks.values()) == {2, 3}


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"rank_pattern": {"up_proj": 2}}, "lora.rank_pattern: 'up_proj' matches nothing that gets an adapter"),
        ({"alpha_pattern": {"q_(": 2}}, r"lora.alpha_pattern: 'q_\(' is not a valid regular expression"),
        ({"rank_pattern": {"q_proj": 99}}, "lora.rank_pattern is 99"),
        ({"layers_to_transform": [0, 7]}, "lora.layers_to_transform names layers that the model does not have: 7"),
        ({"exclude_modules": ["lm_head"]}, "lora.exclude_modules: 'lm_head' matches nothing"),
        ({"exclude_modules": ["q_proj", "down_proj"]}, "'q_proj' matches no linear layer"),
    ],
)
def test_what_means_nothing_in_the_model_is_refused(lora: dict[str, Any], told: str) -> None:
    with pytest.raises(UserInputError, match=told):
        add_lora(toy(), section(**lora))


def test_dora_is_refused_for_fused_tensors_and_weights_in_fp8() -> None:
    from shardtune.model.quantized import use_fp8_storage

    with pytest.raises(UserInputError, match="PEFT has no DoRA for"):
        add_lora(toy("mixtral"), section(target_modules=["experts"], use_dora=True))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    use_fp8_storage(model, {"model.layers.0.self_attn.q_proj.weight": (1, 32)})
    with pytest.raises(UserInputError, match="is held in FP8"):
        add_lora(model, section(use_dora=True))
