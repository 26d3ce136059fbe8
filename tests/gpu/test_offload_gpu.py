"""Inputs of checkpointed layers in the host's memory, on a GPU: the same bits, and their memory is free in between."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from toys import toy_text_config
from transformers import LlamaForCausalLM

from shardtune.parallel.offload import OffloadedInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, HIDDEN, TOKENS = 12, 1024, 4096


def toy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = toy_text_config(
        "llama", hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def step(model: LlamaForCausalLM, offloaded: bool, seed: int) -> tuple[list[Tensor], int]:
    """Hidden states and gradients of a pass, and the bytes held between forward and backward."""
    model.zero_grad()
    ids = torch.randint(3, 70, (2, TOKENS), generator=torch.Generator().manual_seed(seed)).cuda()
    before = torch.cuda.memory_allocated()
    with OffloadedInputs(HIDDEN, torch.device("cuda")) if offloaded else nullcontext():
        hidden = model.model(input_ids=ids, use_cache=False)[0]
        held = torch.cuda.memory_allocated() - before
        (hidden.float() * torch.linspace(-1, 1, HIDDEN, device="cuda")).sum().backward()
    gradients = [p.grad.clone() for p in model.model.parameters() if p.grad is not None]
    return [hidden.detach(), *gradients], held


def test_the_same_bits_every_time_and_less_held_in_between() -> None:
    model = toy()
    one_input = 2 * TOKENS * HIDDEN * 2
    for seed in range(6):  # a copy that comes too early or too late would show in one of them
        meant, kept = step(model, False, seed)
        found, held = step(model, True, seed)
        assert len(found) > LAYERS and all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))
        assert kept - held >= (LAYERS - 4) * one_input
