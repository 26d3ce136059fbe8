"""Which layers train in full, and which cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.utils.other import ModulesToSaveWrapper
from toys import toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError


def adapted(saved: str | list[str], tied: bool = False, **lora: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toy_text_config("llama", tie_word_embeddings=tied))
    return add_lora(model, LoraSection(r=2, target_modules="attention", modules_to_save=saved, **lora))


@pytest.mark.parametrize(
    ("saved", "meant"),
    [
        ("norm", ["model.norm"]),  # PEFT's own rule would take every layer's norms
        (["embed_tokens", "lm_head"], ["lm_head", "model.embed_tokens"]),
        (["layers.1.input_layernorm"], ["model.layers.1.input_layernorm"]),
        (r".*layernorm", [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")]),
    ],
)  # fmt: skip
def test_names_mean_whole_parts_and_the_table_counts_what_trains(saved: str | list[str], meant: list[str]) -> None:
    model, coverage, _ = adapted(saved)
    wrapped = [name.removeprefix("base_model.model.") for name, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper)]  # fmt: skip
    assert sorted(wrapped) == sorted(meant)
    assert (coverage.rows[-1].pattern, coverage.rows[-1].modules) == ("in full", len(meant))
    assert coverage.trainable == sum(row.parameters for row in coverage.rows)
    _, without, _ = adapted([])
    assert coverage.base == without.base and coverage.total == without.total
    assert coverage.in_full == coverage.rows[-1].parameters and without.in_full == 0


@pytest.mark.parametrize(
    ("saved", "tied", "told"),
    [
        ("lm_hed", False, "'lm_hed' matches no layer of the model"),
        ("layers.0", False, "'layers.0' matches no layer of the model"),
        ("q_proj", False, "q_proj' also gets an adapter"),
        ("embed_tokens", True, "is tied to the other embedding"),
    ],
)
def test_what_cannot_train_in_full_is_refused(saved: str, tied: bool, told: str) -> None:
    with pytest.raises(UserInputError, match=told):
        adapted(saved, tied)
