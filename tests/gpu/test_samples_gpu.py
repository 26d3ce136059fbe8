"""Answers through variable-length attention: the flat layout of a GPU says what the padded one says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.test_varlen import dense, mistral4

from shardtune.data.collate import Collator
from shardtune.kernels import varlen
from shardtune.train.samples import greedy, next_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ALONE: Any = SimpleNamespace(world_size=1)
PROMPTS = [[1, 10, 20, 30], [1, 44], [1, 9, 8, 7, 6, 5, 4]]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("make", [dense, mistral4])
def test_flat_answers_are_those_of_padded_rows(make: Any) -> None:
    torch.manual_seed(0)
    model = make().to(CUDA, torch.bfloat16).eval()
    said = {}
    for layout, attention in (("padded", "sdpa"), ("flat", varlen.NAME)):
        varlen.register()
        model.set_attn_implementation(attention)
        said[layout] = greedy(
            lambda rows, layout=layout: next_tokens(model, Collator(0, layout), rows, CUDA),
            PROMPTS, 6, set(), ALONE, lambda: True,
        )  # fmt: skip
    # In bf16 two ways of summing may part at a near tie, and go separate ways from there.
    same = sum(a == b for rows in zip(*said.values(), strict=True) for a, b in zip(*rows, strict=True))
    assert same >= 14, said
