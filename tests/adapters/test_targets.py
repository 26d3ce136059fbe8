"""Which parts of a model a LoRA target means, what is said about it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from toys import toy_text_config

from shardtune.adapters.lora import add_lora
from shardtune.adapters.targets import Resolution, resolve_targets
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError
from shardtune.model.families.registry import family_for, family_of
from shardtune.model.model_outline import outline_of

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHARED = [f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
MLA = [f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
ROUTED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def toy(model_type: str, **changes: object) -> Any:
    """On the meta device: names and shapes are all that targets need."""
    family = family_for(model_type)
    config = toy_text_config(model_type, **changes)
    with torch.device("meta"):
        if family is None:
            return transformers.AutoModelForCausalLM.from_config(config)
        return getattr(transformers, family.causal_lm[model_type])(config)


def resolved(model: Any, targets: str | list[str], **lora: Any) -> Resolution:
    section = LoraSection(**{"r": 4, "lora_dropout": 0.0, "target_modules": targets, **lora})
    return resolve_targets(outline_of(model, family_of(model)), section)


def reached(resolution: Resolution) -> set[str]:
    """The names below a decoder layer that get an adapter; each must in both layers."""
    names = [name.split(".", 3)[-1] for name in resolution.sites]
    assert all(names.count(name) == 2 for name in names)
    return set(names)


def refused(model: Any, targets: str | list[str], **lora: Any) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        resolved(model, targets, **lora)
    return caught.value


# Names and expressions


def test_names_match_whole_last_parts_only() -> None:
    (target,) = resolved(toy("llama"), "q_proj").targets
    assert target.modules == ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    refused(toy("llama"), "proj")


def test_a_module_two_entries_match_counts_for_the_first() -> None:
    first, second = resolved(toy("llama"), ["layers.0.self_attn.q_proj", "q_proj"]).targets
    assert len(first.modules) == 1 and second.modules == ("model.layers.1.self_attn.q_proj",)


def test_a_regular_expression_means_full_names() -> None:
    (target,) = resolved(toy("llama"), r"model\.layers\.1\..*_proj").targets
    assert len(target.modules) == 7 and all(".layers.1." in name for name in target.modules)


def test_a_broken_regular_expression_is_named() -> None:
    assert "not a valid regular expression" in refused(toy("llama"), "model.(").what


def test_a_target_that_matches_nothing_lists_what_there_is_and_the_nearest() -> None:
    error = refused(toy("llama"), ["q_proj", "qproj"])
    assert "'qproj' matches no linear layer of LlamaForCausalLM" in error.what
    assert error.why.startswith("Did you mean 'q_proj'")
    for name in SEVEN:
        assert f"{name} (×2)" in error.fix
    assert "Words: attention, mlp" in error.fix


def test_what_there_is_in_a_mixture_includes_its_fused_tensors() -> None:
    error = refused(toy("mixtral"), "experts.gate_upproj")
    assert "Did you mean 'experts.gate_up_proj'" in error.why
    assert (
        "Fused experts and routers: gate.weight (×2), experts.gate_up_proj (×2), experts.down_proj (×2)." in error.fix
    )


def test_a_target_that_is_not_a_linear_layer_says_what_it_is() -> None:
    assert "LlamaAttention, which is not a linear layer" in refused(toy("llama"), "self_attn").why


def test_the_output_head_is_refused_with_the_reason() -> None:
    assert "output head" in refused(toy("llama", tie_word_embeddings=False), "lm_head").why


def test_no_target_at_all_is_refused() -> None:
    section = LoraSection.model_construct(target_modules=[])
    with pytest.raises(UserInputError, match="nothing would train"):
        resolve_targets(outline_of(toy("llama"), family_of(toy("llama"))), section)


# Words


def test_by_default_attention_and_mlp_are_meant() -> None:
    section = LoraSection(r=4)
    targets = resolve_targets(outline_of(toy("llama"), family_of(toy("llama"))), section).targets
    assert [(target.pattern, len(target.modules)) for target in targets] == [("attention", 8), ("mlp", 6)]


@pytest.mark.parametrize(
    ("model_type", "attention", "mlp"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}),
        ("phi", {"q_proj", "k_proj", "v_proj", "dense"}, {"fc1", "fc2"}),
        ("phi3", {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}),
        ("falcon", {"query_key_value", "dense"}, {"dense_h_to_4h", "dense_4h_to_h"}),  # no file: inspected
    ],
)
def test_the_words_mean_what_the_family_says(model_type: str, attention: set[str], mlp: set[str]) -> None:
    first, second = resolved(toy(model_type), ["attention", "mlp"]).targets
    assert {name.rpartition(".")[2] for name in first.modules} == attention
    assert {name.rpartition(".")[2] for name in second.modules} == mlp


def test_all_linear_is_everything_but_the_output_head() -> None:
    (target,) = resolved(toy("llama", tie_word_embeddings=False), "all-linear").targets
    assert len(target.modules) == 14 and not any("lm_head" in name for name in target.modules)


def test_words_and_names_mix() -> None:
    first, second = resolved(toy("llama"), ["down_proj", "attention"]).targets
    assert len(first.modules) == 2 and len(second.modules) == 8


@pytest.mark.parametrize("word", ["experts", "shared-experts", "router"])
def test_a_word_for_what_the_model_has_not_is_an_error(word: str) -> None:
    error = refused(toy("llama"), word)
    assert f"'{word}' matches nothing in LlamaForCausalLM" in error.what
    assert "Its linear layers are: q_proj" in error.fix


def test_an_inspected_model_shows_what_was_found() -> None:
    for targets in ("attention", "q_proj", "all-linear"):  # however they are written: packing hangs on it too
        (notice,) = resolved(toy("starcoder2"), targets).notices
        assert "starcoder2 has no family file" in notice and "attention = q_proj, k_proj, v_proj, o_proj" in notice
        assert "Packing, torch.compile" in notice


def test_a_linear_layer_the_family_file_does_not_know_is_told() -> None:
    model = toy("llama")
    model.model.layers[0].extra = nn.Linear(8, 8, device="meta")
    (notice,) = resolved(model, "attention").notices
    assert "does not list extra" in notice
    assert "model.layers.0.extra" in resolved(model, "all-linear").sites


# Names of other architectures


def test_the_seven_classic_names_reach_latent_attention_and_say_so_once() -> None:
    resolution = resolved(toy("mistral4"), SEVEN, experts=False)
    assert reached(resolution) == {*MLA, *SHARED}
    (notice,) = resolution.notices
    assert "q_proj → self_attn.q_a_proj, self_attn.q_b_proj" in notice
    assert "k_proj, v_proj → self_attn.kv_a_proj_with_mqa, self_attn.kv_b_proj" in notice


def test_fused_and_renamed_projections_are_found_by_their_classic_names() -> None:
    assert reached(resolved(toy("phi3"), SEVEN)) == {
        "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj",
    }  # fmt: skip
    assert len(resolved(toy("phi"), SEVEN).sites) == 12
    assert "o_proj → self_attn.dense" in resolved(toy("phi"), ["o_proj"]).notices[0]


def test_names_that_are_there_are_not_translated() -> None:
    assert resolved(toy("llama"), SEVEN).notices == []
    model = toy("mistral4", q_lora_rank=None)
    assert reached(resolved(model, "q_proj")) == {"self_attn.q_proj"}
    assert resolved(model, "q_proj").notices == []


# Routed experts


@pytest.mark.parametrize("targets", ["mlp", ["gate_proj", "up_proj", "down_proj"], ["w1", "w2", "w3"], "all-linear"])
def test_routed_experts_train_only_when_asked_for(targets: str | list[str]) -> None:
    attention = set(MLA) if targets == "all-linear" else set()
    for experts in (None, False):
        assert reached(resolved(toy("mistral4"), targets, experts=experts)) == {*SHARED} | attention
    assert reached(resolved(toy("mistral4"), targets, experts=True)) == {*SHARED, *ROUTED} | attention


def test_what_is_left_untouched_is_told_with_its_size_when_nobody_was_asked() -> None:
    model = toy("mistral4")
    (notice,) = resolved(model, ["attention", "mlp"]).notices
    size = 2 * 4 * (32 * 32 + 32 * 16)
    share = size / sum(p.numel() for p in model.parameters())
    adapters = 2 * 4 * 4 * ((32 + 32) + (32 + 16))
    assert f"{size:,} parameters, {share:.0%} of the model" in notice
    assert f"({adapters:,} trainable parameters at rank 4)" in notice and "lora.experts: true" in notice
    assert resolved(model, ["attention", "mlp"], experts=False).notices == []
    assert resolved(model, ["attention", "mlp"], experts=True).notices == []
    assert resolved(model, ["attention"]).notices == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gpt_oss", "They cannot be adapted: experts have biases"),
        ("llama4_text", "They cannot be adapted: the inputs of an expert are scaled"),
    ],
)
def test_adapting_experts_is_not_recommended_where_it_is_refused(kind: str, why: str) -> None:
    model = toy(kind)
    (notice,) = resolved(model, ["attention", "all-linear"]).notices
    assert why in notice and "lora.experts: true" not in notice
    assert resolved(model, ["attention", "all-linear"], experts=False).notices == []
    with pytest.raises(UserInputError, match="support neither LoRA nor FP8 storage"):
        add_lora(model, LoraSection(r=4, lora_dropout=0.0, target_modules="all-linear", experts=True))


@pytest.mark.parametrize("target", ["experts", "experts.gate_up_proj", "gate_up_proj", r".*\.mlp\.experts\..*"])
def test_naming_the_experts_adapts_them_whatever_lora_experts_says_unless_it_says_no(target: str) -> None:
    (found,) = resolved(toy("mistral4"), target).targets
    assert found.modules == () and set(found.parameters) >= {"model.layers.0.mlp.experts.gate_up_proj"}
    assert (
        "selects the routed experts, but lora.experts is false" in refused(toy("mistral4"), target, experts=False).what
    )


def test_an_expression_that_reaches_more_than_experts_asks_lora_experts() -> None:
    everything = r".*down_proj"
    assert reached(resolved(toy("mistral4"), everything)) == {"mlp.shared_experts.down_proj"}
    assert "no adapter, because lora.experts is not set" in resolved(toy("mistral4"), everything).notices[0]
    assert ROUTED[1] in reached(resolved(toy("mistral4"), everything, experts=True))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_without_a_shared_expert_the_mlp_is_a_notice_while_something_else_trains(model_type: str) -> None:
    resolution = resolved(toy(model_type), ["attention", "mlp"])
    assert {target.pattern: len(target.modules) for target in resolution.targets} == {"attention": 8, "mlp": 0}
    assert "no adapter, because lora.experts is not set" in resolution.notices[0]
    (notice,) = resolved(toy(model_type), ["attention", "mlp"], experts=False).notices
    assert "'mlp' has no effect" in notice


@pytest.mark.parametrize("experts", [None, False])
def test_a_run_that_would_train_nothing_is_refused(experts: bool | None) -> None:
    error = refused(toy("mixtral"), ["gate_proj", "up_proj", "down_proj"], experts=experts)
    assert "would train nothing" in error.what and "lora.experts: true" in error.fix


def test_expert_settings_without_effect_are_told() -> None:
    assert "has no routed experts" in resolved(toy("llama"), "mlp", experts=True).notices[0]
    assert "no entry of lora.target_modules selects" in resolved(toy("mistral4"), "attention", experts=True).notices[0]
    told = resolved(toy("mistral4"), "attention", expert_r=2, expert_alpha=4).notices
    assert [notice.split()[0] for notice in told] == ["lora.expert_r", "lora.expert_alpha"]


# The router


@pytest.mark.parametrize("target", ["router", "mlp.gate", "gate", "mlp.gate.weight", r".*\.mlp\.gate"])
def test_the_router_is_adapted_when_named(target: str) -> None:
    (found,) = resolved(toy("mistral4"), target).targets
    assert found.parameters == ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight")


@pytest.mark.parametrize("targets", ["all-linear", ["attention", "mlp", "experts"], SEVEN, r".*mlp.*"])
def test_the_router_is_never_adapted_otherwise(targets: str | list[str]) -> None:
    assert "mlp.gate.weight" not in reached(resolved(toy("mistral4"), targets, experts=True))


def test_a_router_that_is_a_linear_layer_is_a_router_all_the_same() -> None:
    model = toy("llama4_text", interleave_moe_layer_step=1)
    assert not any("router" in name for name in resolved(model, "all-linear", experts=True).sites)
    assert resolved(model, "router").targets[0].parameters == (
        "model.layers.0.feed_forward.router.weight",
        "model.layers.1.feed_forward.router.weight",
    )


# What cannot be had


def test_a_rank_larger_than_a_layer_names_the_layer_and_the_largest_that_makes_sense() -> None:
    error = refused(toy("llama"), "attention", r=17)
    assert "lora.r is 17, but 'model.layers.0.self_attn.k_proj' is 16 × 32" in error.what
    assert "(3 more layers are too small as well.)" in error.what
    assert "Set lora.r to 16 or less" in error.fix
    assert resolved(toy("llama"), "attention", r=16).sites


def test_the_rank_of_experts_is_judged_by_their_own_key() -> None:
    error = refused(toy("mistral4"), ["attention", "experts"], expert_r=17)
    assert "lora.expert_r is 17, but 'model.layers.0.mlp.experts.down_proj' is 4 × 32 × 16" in error.what
    assert "lora.r is 17" in refused(toy("mistral4"), "experts", r=17).what
    assert resolved(toy("mistral4"), ["experts"], r=99, expert_r=16).sites


@pytest.mark.parametrize("target", ["experts.down_proj", "mlp.gate"])
def test_dropout_on_a_fused_tensor_is_refused_with_the_reason(target: str) -> None:
    error = refused(toy("mistral4"), ["attention", target], lora_dropout=0.1)
    assert "lora.lora_dropout is 0.1" in error.what and target in error.what
    assert "W + B·A" in error.why and "lora_dropout: 0" in error.fix
    assert resolved(toy("mistral4"), ["attention", "mlp"], lora_dropout=0.1).sites
