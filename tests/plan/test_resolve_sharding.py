"""What runs of real models choose, and which groups of ranks are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from shardtune.config import ResolvedConfig, load_config
from shardtune.errors import UserInputError
from shardtune.model.families.registry import family_of
from shardtune.model.model_outline import outline_of
from shardtune.model.outline import Outline
from shardtune.plan.facts import Facts, Machine
from shardtune.plan.gather import gather_facts
from shardtune.plan.resolve import ResolvedRun, resolve

GIB = 1 << 30
H200 = 143771 << 20
MODELS = {
    "7B": (
        MistralForCausalLM,
        MistralConfig(vocab_size=32768, intermediate_size=14336, num_key_value_heads=8),
    ),
    "70B": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8,
        ),
    ),
    "119B": (Mistral4ForCausalLM, Mistral4Config()),
}  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    file = tmp_path / "run.yaml"
    data = "data: {dataset_name_or_path: d, max_length: 4096}"
    file.write_text(f"model: {{model_name_or_path: m}}\n{data}\nlora: {{r: 16}}\ntrain: {{packing: false}}\n")
    return lambda *overrides: load_config(file, overrides, environ={})


@cache
def outline(name: str) -> Outline:
    kind, config = MODELS[name]
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.bfloat16)
    return outline_of(model, family_of(model))


def facts_of(name: str, asked: ResolvedConfig, nodes: tuple[int, ...] = (1,), memory: int = H200) -> Facts:
    facts = gather_facts(asked.config, outline(name), Machine("cuda", memory, nodes[0], nodes), lambda: 1.0)
    if name != "119B":
        return facts
    return replace(facts, kinds=tuple(replace(kind, quantised=frozenset(kind.parameters)) for kind in facts.kinds))


@pytest.mark.parametrize(
    ("name", "nodes", "memory", "expected"),
    [
        ("119B", (1, 1, 1), H200, ("fp8", "replicate", None)),
        ("119B", (1, 1, 1), 80 * GIB, ("fp8", "full", None)),
        ("119B", (8, 8), H200, ("bf16", "hybrid", 8)),
        ("70B", (8, 8), H200, ("bf16", "hybrid", 4)),
        ("70B", (2,), H200, ("bf16", "full", None)),
        ("70B", (1, 1, 1), H200, ("bf16", "full", None)),
        ("7B", (8, 8), H200, ("bf16", "replicate", None)),
        ("7B", (1,), H200, ("bf16", "replicate", None)),
    ],
)
def test_auto_is_the_sharding_with_which_the_run_is_fastest(
    name: str, nodes: tuple[int, ...], memory: int, expected: tuple[str, str, int | None], asked: Any
) -> None:
    settings = asked("model.torch_dtype=auto")
    run = resolve(settings, facts_of(name, settings, nodes, memory))
    parallel = run.config.parallel
    assert (run.config.model.base_precision, parallel.shard, parallel.shard_size) == expected
    why = run.reason("parallel.shard") or ""
    assert "one process" in why if sum(nodes) == 1 else "the fastest that fits: about" in why and "GiB usable" in why
    if parallel.shard != "replicate":
        assert "replicate: " in why


def test_what_fits_nowhere_is_refused_with_what_would_fit_and_may_be_tried(asked: Any) -> None:
    settings = asked("parallel.offload_params=false")
    with pytest.raises(UserInputError) as caught:
        resolve(settings, facts_of("119B", settings, (1, 1), 40 * GIB))
    assert "does not fit" in caught.value.what and "40" in caught.value.what
    assert "parallel.offload_params: true" in caught.value.fix and "8 such GPUs" in caught.value.fix
    settings = asked("parallel.offload_params=false", "guards.memory_plan=warn")
    run = resolve(settings, facts_of("119B", settings, (1, 1), 40 * GIB))
    assert "the least memory" in (run.reason("parallel.shard") or "")
    assert [notice.about for notice in run.notices] == ["memory"]


def hybrid(asked: Any, nodes: tuple[int, ...], *overrides: str) -> ResolvedRun:
    settings = asked("parallel.shard=hybrid", *overrides)
    return resolve(settings, facts_of("7B", settings, nodes))


@pytest.mark.parametrize(
    ("nodes", "size", "what", "fix"),
    [
        ((4,), 3, "parallel.shard_size is 3, but the run has 4 processes (4 per node).", "Set parallel.shard_size to 2, or parallel.shard: full or replicate."),
        ((2, 2, 2), 3, "6 processes (2 + 2 + 2 per node).", "Set parallel.shard_size to 2, or"),
        ((2, 1), None, "parallel.shard is hybrid, but nodes have different numbers of processes (2 + 1).", "Set parallel.shard: full or replicate."),
        ((4, 2), None, "different numbers of processes (4 + 2).", "Set parallel.shard_size to 2, or"),
        ((4, 2), 3, "6 processes (4 + 2 per node).", "Set parallel.shard_size to 2, or"),
    ],
)  # fmt: skip
def test_groups_that_nodes_cannot_have_are_refused_with_those_they_can(
    nodes: tuple[int, ...], size: int | None, what: str, fix: str, asked: Any
) -> None:
    with pytest.raises(UserInputError) as caught:
        hybrid(asked, nodes, *([f"parallel.shard_size={size}"] if size else []))
    assert caught.value.what.endswith(what) and caught.value.fix.startswith(fix)
    assert caught.value.exit_code == 2


def test_groups_within_unequal_nodes_can_be_asked_for(asked: Any) -> None:
    run = hybrid(asked, (4, 2), "parallel.shard_size=2")
    assert run.config.parallel.shard_size == 2 and run.notices == ()


@pytest.mark.parametrize(
    ("nodes", "size", "text"),
    [
        ((1,), None, "there is one process: nothing is sharded."),
        ((1, 1, 1), None, "each node has one process: every process holds the whole base, as with replicate."),
        ((4,), None, "there is one node: the base is sharded over all 4 processes, as with full."),
        ((2, 2), 1, "parallel.shard_size is 1: every process holds the whole base, as with replicate."),
        ((2, 2), 4, "parallel.shard_size is 4: the base is sharded over all 4 processes, as with full."),
        ((2, 2), None, None),
    ],
)
def test_hybrid_says_where_it_comes_to_something_else(
    nodes: tuple[int, ...], size: int | None, text: str | None, asked: Any
) -> None:
    run = hybrid(asked, nodes, *([f"parallel.shard_size={size}"] if size else []))
    assert run.config.parallel.shard_size == (size or nodes[0])
    found = [notice.text for notice in run.notices if notice.about == "sharding"]
    assert found == ([f"parallel.shard is hybrid, but {text}"] if text else [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["parallel.shard_size=2"], "set shard: hybrid, or remove shard_size"),
        (["parallel.shard=full", "parallel.shard_size=2"], "set shard: hybrid, or remove shard_size"),
        (
            ["parallel.shard=replicate", "parallel.reshard_after_forward=true"],
            "remove it, or set shard: auto, full or hybrid",
        ),
    ],
)
def test_a_setting_without_an_effect_is_refused(settings: list[str], said: str, asked: Any) -> None:
    with pytest.raises(UserInputError) as caught:
        asked(*settings)
    assert said in " ".join(str(caught.value).split()) and caught.value.exit_code == 2
