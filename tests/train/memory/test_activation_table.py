"""The stored table against fresh traces: what a kernel keeps has not changed, and any size follows from one."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.plan import activations as plan
from shardtune.train.memory.activation_table import Names, Setting, config_of, trace
from shardtune.train.memory.layer_trace import TensorSize

COMPILED = Setting("linear", compiled=True, fused_lora=True, packed=False, mode="none", dropout=False)
UNCOMPILED = Setting("linear", compiled=False, fused_lora=True, packed=True, mode="selective", dropout=True)
EXPERTS = Setting("experts", compiled=True, fused_lora=True, packed=True, mode="selective", dropout=False)
PEFT = Setting("attention", compiled=False, fused_lora=False, packed=False, mode="none", dropout=False)
# Sizes of real models, none of which was traced for the table.
REAL: list[tuple[str, Setting, dict[str, Any]]] = [
    ("llama", COMPILED, {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
                         "head_dim": 64}),
    ("llama", COMPILED, {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
                         "num_key_value_heads": 8, "head_dim": 128}),
    ("qwen3", UNCOMPILED, {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
                           "num_key_value_heads": 8, "head_dim": 128}),
    ("qwen3_moe", EXPERTS, {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
                            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}),
]  # fmt: skip


def stored(model_type: str, setting: Setting) -> plan.LayerActivations:
    kinds = plan.families()[model_type]
    found: plan.LayerActivations = plan.stored_layer(
        kinds["experts" if is_sparse(model_type) else "dense"][setting.key]
    )
    return found


def is_sparse(model_type: str) -> bool:
    return "experts" in plan.families()[model_type]


@pytest.mark.parametrize(
    ("model_type", "setting"),
    [("llama", COMPILED), ("mistral4", EXPERTS), ("gemma3_text", UNCOMPILED), ("phi3", PEFT)],
)
def test_a_fresh_trace_is_what_the_table_says(model_type: str, setting: Setting) -> None:
    """If this fails, a layer keeps something else than before: `make activations`, and look at what has changed."""
    traced, dimensions = trace(config_of(model_type, is_sparse(model_type)), setting)
    table, names = stored(model_type, setting), Names(dimensions)
    assert str(names.total(traced.kept)) == str(table.kept)
    moments = {str(names.moment(one)) for one in traced.moments}
    assert moments >= {str(one) for one in table.moments}


@pytest.mark.parametrize(("model_type", "setting", "sizes"), REAL)
def test_other_sizes_follow_from_the_table(model_type: str, setting: Setting, sizes: dict[str, Any]) -> None:
    tokens = 4093
    traced, dimensions = trace(config_of(model_type, is_sparse(model_type), **sizes), setting, tokens)
    table = stored(model_type, setting)
    assert table.kept.count(dimensions, tokens) == pytest.approx(size(traced.kept), rel=0.01)
    peak = max(one.alive.count(dimensions, tokens) for one in table.moments)
    assert peak == pytest.approx(max(size(one.alive) for one in traced.moments), rel=0.02)


def size(tensors: tuple[TensorSize, ...]) -> int:
    return sum(one.numel * one.itemsize for one in tensors)
