"""The stored table against fresh traces: what a kernel keeps has not changed, and any size follows from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from shardtune.config import load_config
from shardtune.model.meta_model import build_meta_model
from shardtune.plan import activations as plan
from shardtune.plan.facts import Machine
from shardtune.plan.gather import gather_facts
from shardtune.plan.memory import gpu_memory
from shardtune.plan.work import Work
from shardtune.train.memory.activation_table import Names, Setting, config_of, trace, trace_now
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


def test_a_model_can_be_traced_now(tmp_path: Path) -> None:
    """What `plan --exact` does for a family that nobody has tabled: here one that is, for comparison."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
    LlamaConfig(num_hidden_layers=3, vocab_size=128, dtype="bfloat16", **sizes).save_pretrained(tmp_path)
    (tmp_path / "run.yaml").write_text(
        f"model: {{model_name_or_path: {tmp_path}, weights: random}}\ndata: {{dataset_name_or_path: d}}\n"
    )
    config = load_config(tmp_path / "run.yaml", ["lora.lora_dropout=0"], environ={}).config
    meta_model = build_meta_model(config.model, tmp_path, {})
    machine = Machine("cuda", 80 << 30, processes_here=1, nodes=(1,))
    facts = gather_facts(config, meta_model.outline, machine, lambda: 1.0)
    work = Work(batch=2, length=1024, compiled=True, checkpointing="none")
    traced = gpu_memory(facts, work, trace_now(config, facts, work, meta_model))
    assert traced.known_by == "traced" and len(facts.kinds) == 1
    assert traced.allocated == pytest.approx(gpu_memory(facts, work).allocated, rel=0.01)
