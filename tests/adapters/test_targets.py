"""Which modules a LoRA target means, what trains after that, and what is said when nothing does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from shardtune.adapters.lora import add_lora
from shardtune.adapters.targets import resolve_targets
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(**changes: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))


def mistral4() -> Mistral4ForCausalLM:
    return Mistral4ForCausalLM(
        Mistral4Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
            q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=0,
        )
    )  # fmt: skip


def test_names_match_whole_last_parts_only() -> None:
    (target,) = resolve_targets(llama(), "q_proj")
    assert target.modules == ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    with pytest.raises(UserInputError):
        resolve_targets(llama(), "proj")


def test_all_linear_is_everything_but_the_output_head() -> None:
    (target,) = resolve_targets(llama(tie_word_embeddings=False), "all-linear")
    assert len(target.modules) == 14
    assert not any("lm_head" in name for name in target.modules)


def test_a_module_two_patterns_match_counts_once() -> None:
    first, second = resolve_targets(llama(), ["layers.0.self_attn.q_proj", "q_proj"])
    assert len(first.modules) == 1 and second.modules == ("model.layers.1.self_attn.q_proj",)


def test_a_regular_expression_means_full_names() -> None:
    model = llama()
    (target,) = resolve_targets(model, r"model\.layers\.1\..*_proj")
    assert len(target.modules) == 7
    adapted, coverage = add_lora(model, LoraSection(target_modules=r"model\.layers\.1\..*_proj", r=2))
    assert coverage.rows[0].modules == 7
    assert all("layers.1." in name for name, p in adapted.named_parameters() if p.requires_grad)


def test_a_broken_regular_expression_is_named() -> None:
    with pytest.raises(UserInputError, match="not a valid regular expression"):
        resolve_targets(llama(), "model.(")


def test_a_target_that_matches_nothing_lists_what_there_is_and_the_nearest() -> None:
    with pytest.raises(UserInputError) as caught:
        resolve_targets(llama(), ["q_proj", "qproj"])
    assert "'qproj' matches no linear layer of LlamaForCausalLM" in caught.value.what
    assert caught.value.why == "Did you mean 'q_proj'?"
    for name in SEVEN:
        assert f"{name} (×2)" in caught.value.fix


def test_a_target_that_is_not_a_linear_layer_says_what_it_is() -> None:
    with pytest.raises(UserInputError) as caught:
        resolve_targets(llama(), "self_attn")
    assert "LlamaAttention, which is not a linear layer" in caught.value.why


def test_the_output_head_is_refused_with_the_reason() -> None:
    with pytest.raises(UserInputError) as caught:
        resolve_targets(llama(tie_word_embeddings=False), "lm_head")
    assert "output head" in caught.value.why


def test_no_target_at_all_is_refused() -> None:
    with pytest.raises(UserInputError, match="nothing would train"):
        resolve_targets(llama(), [])


def test_the_names_of_another_architecture_are_an_error_not_a_silence() -> None:
    """The seven names everybody copies: Mistral 4 has no q_proj, k_proj or v_proj."""
    with pytest.raises(UserInputError) as caught:
        resolve_targets(mistral4(), SEVEN)
    assert "'q_proj' matches no linear layer of Mistral4ForCausalLM" in caught.value.what
    assert "q_b_proj (×2)" in caught.value.fix and "kv_b_proj (×2)" in caught.value.fix


@pytest.mark.parametrize("patterns", ["all-linear", ["q_proj", "v_proj"], ["layers.0.mlp.up_proj"]])
def test_the_table_counts_exactly_what_trains(patterns: str | list[str]) -> None:
    model = llama()
    before = sum(p.numel() for p in model.parameters())
    adapted, coverage = add_lora(model, LoraSection(target_modules=patterns, r=3))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" in name}
    counted = sum(m.weight.numel() for m in layers.values())
    assert coverage.trainable == counted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert sum(row.parameters for row in coverage.rows) == coverage.trainable
    assert coverage.total == before + counted
    assert coverage.share == counted / (before + counted)


def test_adapters_are_float32_on_a_bfloat16_base_and_the_base_is_frozen() -> None:
    adapted, _ = add_lora(llama().to(torch.bfloat16), LoraSection())
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)


@pytest.mark.parametrize(("bias", "trained"), [("none", 0), ("lora_only", 2), ("all", 6)])
def test_biases_train_as_asked_and_are_counted(bias: str, trained: int) -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SMALL)).to(torch.bfloat16)
    adapted, coverage = add_lora(model, LoraSection(target_modules="q_proj", bias=bias))
    biases = [p for name, p in adapted.named_parameters() if p.requires_grad and name.endswith("bias")]
    assert len(biases) == trained
    assert all(p.dtype == torch.float32 for p in biases)
    assert coverage.trainable == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_the_same_seed_draws_the_same_adapters() -> None:
    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [p.detach() for p in add_lora(llama(), LoraSection())[0].parameters() if p.requires_grad]

    for one, other in zip(drawn(), drawn(), strict=True):
        assert torch.equal(one, other)
