"""Rows of new tokens: what the lookup of them alone computes is what PEFT computes with its copy of the vocabulary."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toys import toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.adapters.lora import add_lora
from shardtune.adapters.new_tokens import token_indices, use_token_rows
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError

IDS = [3, 70, 71]


def toy(kind: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(toy_text_config(kind, **changes))


def loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.tensor([[5, 70, 3, 9, 71, 70, 2], [71, 11, 12, 13, 14, 15, 2]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("gemma3_text", True)], ids=["tied", "untied", "scaled"]
)
def test_the_rows_alone_give_the_loss_and_gradients_of_pefts_copied_vocabulary(kind: str, tied: bool) -> None:
    base = toy(kind, tie_word_embeddings=tied)
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=token_indices(base, IDS))
    plain = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in plain.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    ours = copy.deepcopy(plain)
    use_token_rows(ours)
    meant, found = loss_and_gradients(plain), loss_and_gradients(ours)
    assert found[0] == pytest.approx(meant[0], rel=1e-6)
    assert sum("trainable_tokens_delta" in name for name in found[1]) == (1 if tied else 2)
    torch.testing.assert_close(found[1], meant[1], rtol=1e-4, atol=1e-7)


def test_a_head_of_its_own_trains_its_rows_too_and_the_table_counts_both() -> None:
    for tied, rows in ((True, 3 * 32), (False, 2 * 3 * 32)):
        model, coverage, _ = add_lora(toy(tie_word_embeddings=tied), LoraSection(r=2), new_tokens=IDS)
        assert (coverage.rows[-1].pattern, coverage.rows[-1].parameters) == ("new tokens", rows)
        assert coverage.trainable == sum(row.parameters for row in coverage.rows)
        trained = sum(p.numel() for name, p in model.named_parameters() if "delta" in name and p.requires_grad)
        assert trained == rows


def test_a_head_with_a_bias_is_refused_because_peft_would_leave_it_out() -> None:
    with pytest.raises(UserInputError, match="cannot learn new tokens") as caught:
        add_lora(toy("phi"), LoraSection(r=2, target_modules=["q_proj"]), new_tokens=IDS)
    assert "bias" in caught.value.why
