"""Attention over whole rows without a mask: what transformers' own computes with one, wherever there is a token."""

from __future__ import annotations

import pytest
import torch
from toys import toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.kernels import whole_rows
from shardtune.model.text_config import sees_whole_rows

LENGTHS = (12, 7, 3)


@pytest.mark.parametrize("family", ["llama", "mistral4", "qwen3_moe"])
def test_padding_at_the_end_needs_no_mask(family: str) -> None:
    torch.manual_seed(0)
    config = toy_text_config(family)
    assert sees_whole_rows(config.to_dict(), max(LENGTHS))
    model = AutoModelForCausalLM.from_config(config).eval() if family != "mistral4" else _mistral4(config)
    ids = torch.randint(3, config.vocab_size, (3, max(LENGTHS)))
    mask = torch.stack([(torch.arange(max(LENGTHS)) < length).long() for length in LENGTHS])
    with torch.no_grad():
        meant = model(input_ids=ids, attention_mask=mask).logits
        whole_rows.register()
        model.set_attn_implementation(whole_rows.NAME)
        found = model(input_ids=ids).logits
    for row, length in enumerate(LENGTHS):
        assert torch.allclose(found[row, :length], meant[row, :length], atol=1e-5)


def _mistral4(config: object) -> torch.nn.Module:
    from transformers import Mistral4ForCausalLM

    return Mistral4ForCausalLM(config).eval()


def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def spy(module: object, query: torch.Tensor, key: object, value: torch.Tensor, mask: object, **_: object) -> object:
        seen.append(mask)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None

    monkeypatch.setattr(whole_rows, "sdpa_attention_forward", spy)
    whole_rows.register()
    model = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    model.set_attn_implementation(whole_rows.NAME)
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices", lambda *_: pytest.fail("positions were read")
    )
    model(input_ids=torch.arange(3, 15).view(2, 6))
    assert seen == [None, None]
    monkeypatch.undo()
    whole_rows.register()


@pytest.mark.parametrize(
    ("changes", "longest", "usable"),
    [
        ({}, 64, True),
        ({"sliding_window": 32}, 64, False),
        ({"sliding_window": 64}, 64, True),
        ({"attention_chunk_size": 16}, 64, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 64, False),
    ],
)
def test_a_model_that_does_not_look_all_the_way_back_keeps_its_masks(
    changes: dict[str, object], longest: int, usable: bool
) -> None:
    assert sees_whole_rows({**toy_text_config("llama").to_dict(), **changes}, longest) is usable
