"""What PEFT makes of the targets: which adapters train, how they are counted, and that plain PEFT loads them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from toys import toy_text_config

from shardtune.adapters import peft_form
from shardtune.adapters.lora import add_lora
from shardtune.adapters.peft_form import adapted_ranks, shortest_suffixes
from shardtune.checkpoint.adapter import gather_adapter, write_adapter
from shardtune.config.schema import LoraSection
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.model.families.registry import family_for

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = torch.arange(12).view(2, 6) + 3


def toy(model_type: str, **changes: object) -> Any:
    family = family_for(model_type)
    config = toy_text_config(model_type, **changes)
    torch.manual_seed(0)
    if family is None:
        return transformers.AutoModelForCausalLM.from_config(config)
    return getattr(transformers, family.causal_lm[model_type])(config)


def llama() -> Any:
    return toy("llama")


def section(**lora: Any) -> LoraSection:
    return LoraSection(**{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **lora})


@pytest.mark.parametrize("patterns", ["all-linear", ["q_proj", "v_proj"], ["layers.0.mlp.up_proj"], ["attention"]])
def test_the_table_counts_exactly_what_trains(patterns: str | list[str]) -> None:
    model = llama()
    before = sum(p.numel() for p in model.parameters())
    adapted, coverage, _ = add_lora(model, LoraSection(target_modules=patterns, r=3))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" in name}
    counted = sum(m.weight.numel() for m in layers.values())
    assert coverage.trainable == counted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert sum(row.parameters for row in coverage.rows) == coverage.trainable
    assert coverage.total == before + counted
    assert coverage.base == coverage.active == before
    assert coverage.share == counted / (before + counted)
    adapted_weights = sum(m.base_layer.weight.numel() for m in adapted.modules() if isinstance(m, LoraLayer))
    assert sum(row.covers for row in coverage.rows) == adapted_weights


def test_the_table_of_a_mixture_counts_tensors_and_the_experts_a_token_visits(grouped: list[Any]) -> None:
    model = toy("mistral4")
    before = sum(p.numel() for p in model.parameters())
    adapted, coverage, _ = add_lora(
        model, section(target_modules=["attention", "mlp", "router"], experts=True, expert_r=2)
    )
    attention, mlp, router = coverage.rows
    assert (attention.tensors, mlp.modules, mlp.tensors, router.modules, router.tensors) == (0, 6, 4, 0, 2)
    routed = 2 * 4 * (32 * 32 + 32 * 16)
    assert coverage.visited == (2, 4)
    assert coverage.base == before and coverage.active == before - routed / 2
    assert mlp.covers - mlp.covers_active == routed / 2
    assert router.parameters == 2 * 4 * (4 + 32)
    assert sum(row.parameters for row in coverage.rows) == coverage.trainable
    assert coverage.trainable == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_float32_and_the_base_is_frozen(dtype: torch.dtype) -> None:
    adapted, _, _ = add_lora(llama().to(dtype), LoraSection())
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert parameter.dtype == (torch.float32 if "lora_" in name else dtype)


class Float8Linear(nn.Linear):
    """A frozen weight held in float8, as a loader keeps it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


def test_adapters_on_a_float8_base_are_drawn_in_float32(grouped: list[Any]) -> None:
    model = toy("mistral4")
    for layer in model.model.layers:
        layer.self_attn.o_proj = Float8Linear(layer.self_attn.o_proj)
        experts = layer.mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    adapted, _, _ = add_lora(model, section(target_modules=["o_proj", "experts.down_proj"]))
    drawn = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(drawn) == 8 and all(p.dtype == torch.float32 for p in drawn.values())
    for name, parameter in drawn.items():
        if "lora_A" in name:  # more different values than float8 has
            assert parameter.unique().numel() > 100
            assert not torch.equal(parameter, parameter.to(torch.float8_e4m3fn).float())


def test_on_the_meta_device_nothing_is_allocated_and_nothing_is_drawn(grouped: list[Any]) -> None:
    with torch.device("meta"):
        model = toy("mistral4")
    state = torch.random.get_rng_state()
    adapted, coverage, _ = add_lora(model, section(target_modules=["attention", "mlp", "router"], experts=True))
    assert torch.equal(state, torch.random.get_rng_state())
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert all(p.is_meta and p.dtype == torch.float32 for p in trained)
    on_cpu = add_lora(toy("mistral4"), section(target_modules=["attention", "mlp", "router"], experts=True))
    assert {n: p.shape for n, p in adapted.named_parameters()} == {n: p.shape for n, p in on_cpu[0].named_parameters()}
    assert coverage == on_cpu[1]


@pytest.mark.parametrize(("bias", "trained"), [("none", 0), ("lora_only", 2), ("all", 6)])
def test_biases_train_as_asked_and_are_counted(bias: str, trained: int) -> None:
    adapted, coverage, _ = add_lora(toy("qwen2").to(torch.bfloat16), LoraSection(target_modules="q_proj", bias=bias))
    biases = [p for name, p in adapted.named_parameters() if p.requires_grad and name.endswith("bias")]
    assert len(biases) == trained
    assert all(p.dtype == torch.float32 for p in biases)
    assert coverage.trainable == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_the_same_seed_draws_the_same_adapters() -> None:
    def drawn() -> list[torch.Tensor]:
        model = llama()
        torch.manual_seed(7)
        return [p.detach() for p in add_lora(model, LoraSection())[0].parameters() if p.requires_grad]

    for one, other in zip(drawn(), drawn(), strict=True):
        assert torch.equal(one, other)


DENSE_AND_SPARSE = {"mlp_only_layers": [0]}
DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
ALL = {"target_modules": ["attention", "mlp", "router"], "experts": True, "expert_r": 2}


@pytest.mark.parametrize(
    ("model_type", "changes", "lora"),
    [
        ("mistral4", {}, ALL),
        ("mistral4", {"first_k_dense_replace": 1}, {"target_modules": "all-linear", "experts": True, "expert_r": 3, "expert_alpha": 5}),
        ("mistral4", {}, {**ALL, "use_rslora": True}),
        ("mistral4", {}, {"target_modules": SEVEN}),
        ("mixtral", {}, ALL),
        ("mixtral", {}, {"target_modules": ["experts.down_proj"]}),
        ("qwen3_moe", {}, ALL),
        ("qwen3_moe", DENSE_AND_SPARSE, {}),
        ("qwen3_moe", DENSE_AND_SPARSE, {"target_modules": ["gate_proj"]}),
        ("qwen3_moe", DENSE_AND_SPARSE, ALL),
        ("deepseek_v3", DEEPSEEK, ALL),
        ("phi", {}, {"target_modules": SEVEN}),
        ("phi3", {}, {"target_modules": SEVEN}),
        ("llama", {}, {"target_modules": r"model\.layers\.1\..*_proj"}),
    ],
)  # fmt: skip
def test_plain_peft_loads_the_adapter_with_its_ranks_and_computes_the_same(
    tmp_path: Path, grouped: list[Any], model_type: str, changes: dict[str, object], lora: dict[str, object]
) -> None:
    adapted, _, _ = add_lora(toy(model_type, **changes), section(**lora))
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2)
    write_adapter(adapted, gather_adapter(adapted), tmp_path)
    fresh = toy(model_type, **changes)
    with torch.no_grad():
        untrained, trained = fresh(TOKENS).logits, adapted(TOKENS).logits
        again = PeftModel.from_pretrained(fresh, tmp_path)
        loaded = again(TOKENS).logits
    assert adapted_ranks(again) == adapted_ranks(adapted)
    assert torch.equal(loaded, trained)
    assert (loaded - untrained).abs().max() > 0.01


def config_of(model_type: str, changes: dict[str, object], **lora: Any) -> Any:
    with torch.device("meta"):
        return add_lora(toy(model_type, **changes), section(**lora))[0].peft_config["default"]


def test_the_config_on_disk_is_short_and_in_order(tmp_path: Path, grouped: list[Any]) -> None:
    config = config_of("mistral4", {}, target_modules=["attention", "mlp", "router"], experts=True, expert_r=2)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_modules"] == [
        "down_proj", "gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj", "up_proj",
    ]  # fmt: skip
    assert saved["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj", "gate.weight"]
    assert saved["rank_pattern"] == {"experts.down_proj": 2, "experts.gate_up_proj": 2}


@pytest.mark.parametrize(
    ("lora", "scale"),
    [
        ({"expert_r": 2}, 2.0),  # alpha 8 / rank 4 elsewhere
        ({"expert_r": 2, "expert_alpha": 3}, 1.5),
        ({"expert_alpha": 3}, 0.75),
        ({}, 2.0),
        ({"expert_r": 2, "use_rslora": True}, 8 / 2**0.5),
    ],
)
def test_experts_have_the_scale_of_the_others_unless_told(
    lora: dict[str, Any], scale: float, grouped: list[Any]
) -> None:
    with torch.device("meta"):
        adapted, _, _ = add_lora(toy("mistral4"), section(target_modules=["o_proj", "experts"], **lora))
    scales = [s for name, (_, s) in adapted_ranks(adapted).items() if ".experts." in name]
    assert scales == [pytest.approx(scale)] * 4


def test_expert_adapters_are_handed_to_the_grouped_products_and_others_are_not(grouped: list[Any]) -> None:
    with torch.device("meta"):
        add_lora(toy("mistral4"), section(target_modules=["attention", "mlp", "router"]))
        assert grouped == []
        adapted, _, _ = add_lora(toy("mistral4"), section(target_modules=["experts"]))
    assert grouped == [adapted]


def test_a_dense_layer_peft_would_take_for_experts_needs_dropout_off() -> None:
    with torch.device("meta"), pytest.raises(UserInputError) as caught:
        add_lora(toy("qwen3_moe", mlp_only_layers=[0]), section(target_modules=["up_proj"], lora_dropout=0.1))
    assert "'model.layers.0.mlp.up_proj' can only be adapted without dropout" in caught.value.what


@pytest.mark.parametrize("wrong", ["modules", "parameters", "ranks"])
def test_an_adapter_that_is_not_as_meant_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, grouped: list[Any], wrong: str
) -> None:
    true = peft_form.peft_config

    def other(*args: Any) -> Any:
        config = true(*args)
        if wrong == "modules":
            config.target_modules = {*config.target_modules, "q_a_proj"}
        elif wrong == "parameters":
            config.target_parameters = ["experts.down_proj"]
        else:
            config.rank_pattern = {"experts.down_proj": 3}
        return config

    monkeypatch.setattr("shardtune.adapters.lora.peft_config", other)
    with torch.device("meta"), pytest.raises(ShardtuneError) as caught:
        add_lora(toy("mistral4"), section(target_modules=["o_proj", "experts"]))
    said = {
        "modules": "unexpected: ['model.layers.0.self_attn.q_a_proj'",
        "parameters": "Missing: ['model.layers.0.mlp.experts.gate_up_proj'",
        "ranks": "with another rank or scale: ['model.layers.0.mlp.experts.down_proj'",
    }
    assert said[wrong] in caught.value.why


def test_the_shortest_ends_of_names_mean_nothing_else() -> None:
    names = ["a.0.x.p", "a.1.x.p", "a.0.y.p", "a.0.x.q", "a.10.x.q"]
    assert shortest_suffixes(["a.0.x.p", "a.1.x.p"], names, parts=1) == ["x.p"]
    assert shortest_suffixes(["a.0.x.q"], names, parts=1) == ["0.x.q"]
    assert shortest_suffixes(["a.0.x.q", "a.10.x.q"], names, parts=1) == ["q"]
    assert shortest_suffixes(["a.0.x.q", "a.10.x.q"], names, parts=2) == ["x.q"]
    assert shortest_suffixes(["p"], ["p", "a.p"], parts=1) == ["p"]


# Mistral Small 4 at its full size, on the meta device


@pytest.mark.parametrize(
    ("targets", "trainable", "of_all"),
    [
        (["attention", "mlp"], 27_463_680, 0.0161),
        (SEVEN, 27_463_680, 0.0161),
        (["o_proj", "shared-experts"], 15_335_424, 0.0127),  # what the seven names reach without their meaning
        (["experts"], 1_056_964_608, 0.9747),
    ],
)
def test_what_trains_at_full_size(grouped: list[Any], targets: list[str], trainable: int, of_all: float) -> None:
    with torch.device("meta"):
        model = transformers.Mistral4ForCausalLM(transformers.Mistral4Config())
    _, coverage, _ = add_lora(model, LoraSection(r=16, lora_dropout=0.0, target_modules=targets))
    assert coverage.trainable == trainable
    assert coverage.base == 118_972_826_624 and round(coverage.active) == 6_632_588_288
    assert sum(row.covers for row in coverage.rows) / coverage.base == pytest.approx(of_all, abs=1e-4)
