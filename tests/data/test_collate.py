"""Batches: what is padded, what is packed, and that packed documents never read each other."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Mistral4Config, Mistral4ForCausalLM, PreTrainedModel

from shardtune.data.collate import REAL_TOKENS, SUPERVISED, TARGETS, Collator
from shardtune.data.tokens import IGNORED


def documents(*lengths: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random documents; in each, the first third carries no loss, as a prompt does."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        ids = rng.integers(3, 60, length).astype(np.int32)
        labels = ids.copy()
        labels[: length // 3] = IGNORED
        made.append((ids, labels))
    return made


def dense() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def mistral4() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Mistral4Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    # Queries are scaled by position; over 8192 positions at full size, over 4 here, so that it shows in a toy.
    config.rope_parameters["original_max_position_embeddings"] = 4
    return Mistral4ForCausalLM(config)


def logits_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    counted = ("labels", SUPERVISED, TARGETS, REAL_TOKENS)
    return model(**{name: value for name, value in batch.items() if name not in counted}, use_cache=False).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [dense, mistral4])
def test_packed_documents_give_the_logits_and_gradients_of_the_rows_alone(make: type, attention: str) -> None:
    model = make()
    model.set_attn_implementation(attention)
    rows = [documents(5, 9, 2), documents(12, 3, seed=1)]
    batch = Collator(0, "packed")(rows)
    assert batch.pop(REAL_TOKENS) == 31
    labels = batch["labels"]

    logits = logits_of(model, batch)
    cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum").backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    for row, places in zip(rows, logits, strict=True):
        start = 0
        for ids, own_labels in row:
            alone = model(torch.from_numpy(ids)[None].long(), use_cache=False).logits[0]
            torch.testing.assert_close(places[start : start + len(ids)], alone, rtol=1e-5, atol=1e-6)
            cross_entropy(alone[:-1], torch.from_numpy(own_labels[1:]).long(), reduction="sum").backward()
            start += len(ids)
    assert packed
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("make", [dense, mistral4])
def test_positions_matter_so_the_test_above_can_fail(make: type) -> None:
    """Without restarting positions the second document's logits are others (in Mistral 4 by its query scaling too)."""
    model = make()
    batch = Collator(0, "packed")([documents(5, 9)])
    right = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    wrong = model(batch["input_ids"], use_cache=False).logits
    assert (right - wrong)[0, 5:].abs().max() > 1e-3
    torch.testing.assert_close(right[0, :5], wrong[0, :5])


def test_a_neighbour_changes_nothing_to_the_bit() -> None:
    model = dense()
    one, other = documents(6, 8), documents(6, 8, seed=9)
    seen = []
    for first in (one[0], other[0]):
        batch = Collator(0, "packed")([[first, one[1]]])
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        seen.append(logits[0, 6:])
    assert torch.equal(seen[0], seen[1])


def test_padding_of_a_packed_row_is_a_document_without_loss() -> None:
    batch = Collator(7, "packed")([documents(4, 3), documents(2)])
    assert batch["input_ids"][1, 2:].tolist() == [7] * 5
    assert batch["labels"][1, 2:].tolist() == [IGNORED] * 5
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]]
    assert "attention_mask" not in batch


def test_the_first_token_of_a_document_is_never_predicted_by_its_neighbour() -> None:
    rows = [[(np.array([5, 6, 7]), np.array([5, 6, 7])), (np.array([8, 9]), np.array([8, 9]))]]
    for layout in ("packed", "flat"):
        assert Collator(0, layout)(rows)["labels"].tolist() == [[IGNORED, 6, 7, IGNORED, 9]]


def test_padded_rows_have_a_mask_and_labels_only_where_there_are_tokens() -> None:
    # The pad token is a token of the text as well: only the place tells.
    rows = [[(np.array([2, 5, 2]), np.array([IGNORED, 5, 2]))], [(np.array([3, 2]), np.array([IGNORED, 2]))]]
    batch = Collator(2, "padded")(rows)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 5, 2], [IGNORED, 2, IGNORED]]
    assert batch["input_ids"].tolist() == [[2, 5, 2], [3, 2, 2]]
    assert batch[REAL_TOKENS] == 5


def test_a_flat_batch_has_no_padding_and_says_where_documents_end() -> None:
    batch = Collator(0, "flat")([documents(4, 3), documents(2)])
    assert batch["input_ids"].shape == (1, 9)
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 7, 9]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 4
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]


def whole(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token n of all is n + 10, and every token is supervised."""
    ids = [np.arange(length) + 10 for length in lengths]
    return [(own, own.copy()) for own in ids]


def test_a_flat_batch_can_be_filled_up_to_one_shape() -> None:
    rows = [whole(5, 3), whole(9)]
    batch = Collator(0, "flat", fill_to=12)(rows)
    bare = Collator(0, "flat")(rows)
    assert batch["input_ids"].shape == (1, 24) and bare["input_ids"].shape == (1, 17)
    assert torch.equal(batch["input_ids"][:, :17], bare["input_ids"])
    assert torch.equal(batch["labels"][:, :17], bare["labels"]) and (batch["labels"][:, 17:] == IGNORED).all()
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8, 17, 24] and batch["max_length_q"] == 12
    assert batch[REAL_TOKENS] == bare[REAL_TOKENS] == 17
    longer = Collator(0, "flat", fill_to=12)([whole(1), whole(1)])
    assert longer["cu_seq_lens_q"].diff().max() == 12  # no document of padding is longer than a row


@pytest.mark.parametrize(("layout", "shape"), [("padded", (3, 12)), ("packed", (3, 12)), ("flat", (1, 36))])
def test_filled_up_a_batch_has_one_shape_whatever_its_rows_are(
    layout: Literal["padded", "packed", "flat"], shape: tuple[int, int]
) -> None:
    collator = Collator(0, layout, fill_to=12, fill_rows=3)
    for rows in ([whole(12), whole(5), whole(9)], [whole(7)], [whole(12), whole(1)]):
        batch = collator(rows)
        assert batch["input_ids"].shape == batch["labels"].shape == shape
        bare = Collator(0, layout)(rows)
        assert batch[REAL_TOKENS] == bare[REAL_TOKENS]
        meant = bare["labels"][bare["labels"] != IGNORED]
        assert torch.equal(batch["labels"][batch["labels"] != IGNORED], meant)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_a_batch_is_filled_up_with_changes_neither_loss_nor_gradients(
    layout: Literal["padded", "packed"], attention: str
) -> None:
    """A row of padding among them: one whose tokens see nothing would make everything NaN."""
    model = dense()
    model.set_attn_implementation(attention)
    rows = [documents(9), documents(6, seed=1)]
    found = []
    for collator in (Collator(0, layout), Collator(0, layout, fill_to=14, fill_rows=4)):
        batch = collator(rows)
        labels = batch["labels"]
        model.zero_grad()
        logits = logits_of(model, batch)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert len(found[0]) > 10
    for bare, filled in zip(*found, strict=True):
        torch.testing.assert_close(filled, bare, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_a_batch_says_where_something_is_predicted_and_what(layout: Literal["padded", "packed", "flat"]) -> None:
    ids = np.arange(6) + 10
    labels = np.where(ids >= 13, ids, IGNORED)
    rows = [[(ids, labels)], [(ids[:4], labels[:4])]]
    batch = Collator(0, layout)(rows)
    flat_ids, where = batch["input_ids"].flatten(), batch[SUPERVISED]
    assert flat_ids[where].tolist() == [12, 13, 14, 12]  # each the token before a supervised one
    assert batch[TARGETS].tolist() == [13, 14, 15, 13]
