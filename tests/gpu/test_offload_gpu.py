"""Inputs of checkpointed layers in the host's memory, on a GPU: the same bits, and their memory is free in between.

Bits can be compared where the same pass gives the same bits twice. The backward pass of fused attention does not (it adds
in whatever order its blocks end), so there is none here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import toy_text_config
from transformers import LlamaForCausalLM

from shardtune.parallel.offload import OffloadedInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, WIDTH, ROWS = 12, 1024, 2
Pass = Callable[[int], Tensor]


class Quick(nn.Module):
    """A layer that is done long before its input is copied: whoever does not wait for a copy reads or writes too early."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + torch.tanh(self.linear(x))
        return changed


def quick_layers() -> tuple[nn.Module, Pass]:
    layers = nn.ModuleList(Quick() for _ in range(LAYERS)).to("cuda", torch.bfloat16)

    def through(seed: int) -> Tensor:
        hidden = torch.randn(ROWS, 4096, WIDTH, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
        hidden = hidden.bfloat16().requires_grad_() * 1.0
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden

    return layers, through


def llama() -> tuple[nn.Module, Pass]:
    config = toy_text_config(
        "llama", hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2048, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def through(seed: int) -> Tensor:
        ids = torch.randint(3, 70, (ROWS, 2048), generator=torch.Generator().manual_seed(seed)).cuda()
        hidden: Tensor = model.model(input_ids=ids, use_cache=False)[0]
        return hidden

    return model.model, through


def step(module: nn.Module, through: Pass, seed: int, *, offloaded: bool) -> tuple[list[Tensor], int]:
    """Results and gradients of a pass, and the bytes held between forward and backward."""
    module.zero_grad()
    before = torch.cuda.memory_allocated()
    with OffloadedInputs(WIDTH, torch.device("cuda")) if offloaded else nullcontext():
        hidden = through(seed)
        held = torch.cuda.memory_allocated() - before
        (hidden.float() * torch.linspace(-1, 1, WIDTH, device="cuda")).sum().backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [hidden.detach(), *gradients], held


def same(found: list[Tensor], meant: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))


@pytest.mark.parametrize("build", [quick_layers, llama])
def test_the_same_bits_every_time_and_less_held_in_between(build: Callable[[], tuple[nn.Module, Pass]]) -> None:
    torch.manual_seed(0)
    module, through = build()
    for seed in range(6):  # a copy that comes too early or too late would show in one of them
        meant, kept = step(module, through, seed, offloaded=False)
        assert len(meant) > LAYERS and same(step(module, through, seed, offloaded=False)[0], meant)
        found, held = step(module, through, seed, offloaded=True)
        assert same(found, meant)
        assert kept - held >= (LAYERS - 4) * found[0].nbytes
