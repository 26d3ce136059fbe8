"""Inputs of checkpointed layers on the host: what is moved, when it comes back, and that nothing else changes."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import toy_text_config
from transformers import LlamaForCausalLM

from shardtune.parallel import offload
from shardtune.parallel.offload import OffloadedInputs

CPU = torch.device("cpu")
LAYERS = 6


class Noting(OffloadedInputs):
    """Notes which inputs are on the device whenever one is saved or asked for."""

    def __init__(self, width: int, least: int = 1) -> None:
        super().__init__(width, CPU)
        self.least = least
        self.moved: list[ref[offload._Offloaded]] = []
        self.there: list[list[int]] = []

    def _pack(self, tensor: Tensor) -> Tensor | offload._Offloaded:
        packed = super()._pack(tensor)
        if isinstance(packed, offload._Offloaded):
            self.moved.append(ref(packed))
            self._note()
        return packed

    def _unpack(self, packed: Tensor | offload._Offloaded) -> Tensor:
        tensor = super()._unpack(packed)
        if isinstance(packed, offload._Offloaded):
            self._note()
        return tensor

    def _note(self) -> None:
        alive = [(place, one()) for place, one in enumerate(self.moved)]
        self.there.append([place for place, one in alive if one is not None and one.tensor is not None])


def through_layers(context: OffloadedInputs, layers: list[nn.Module], x: Tensor) -> None:
    hidden = x.requires_grad_() * 1.0
    with context:
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        hidden.sum().backward()


def test_inputs_leave_two_layers_later_and_come_back_one_layer_before_they_are_needed() -> None:
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)]
    context = Noting(8)
    through_layers(context, layers, torch.randn(2, 3, 8))
    forward, backward = context.there[:LAYERS], context.there[LAYERS:]
    assert forward == [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert [max(there) for there in backward] == [5, 4, 3, 2, 1, 0]
    # The one that is needed and the one that is needed next; those behind are freed with their part of the graph.
    assert all({top, max(0, top - 1)} <= set(there) for top, there in zip(range(5, -1, -1), backward, strict=True))
    assert all(len(there) <= 3 for there in backward)


def test_nothing_outlives_the_backward_pass() -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(LAYERS)]
    context = Noting(8)
    for _ in range(2):
        through_layers(context, layers, torch.randn(2, 3, 8))
        gc.collect()
        assert len(context.moved) % LAYERS == 0 and not [one for one in context.moved if one() is not None]


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 8), torch.randn(2, 3, 4), torch.ones(2, 3, 8, dtype=torch.long), torch.randn(3, 2, 8).transpose(0, 1),
     nn.Parameter(torch.randn(2, 3, 8)), torch.randn(1, 1, 8)],
    ids=["two sides", "another width", "whole numbers", "not contiguous", "a parameter", "small"],
)  # fmt: skip
def test_what_is_no_input_of_a_layer_stays(tensor: Tensor) -> None:
    context = Noting(8, least=100)
    assert context._pack(tensor) is tensor and context._unpack(tensor) is tensor and not context.moved


def test_an_input_is_the_same_when_it_comes_back() -> None:
    context = Noting(8)
    inputs = [torch.randn(2, 3, 8) for _ in range(5)]
    packed = [context._pack(one) for one in inputs]
    first = packed[0]
    assert isinstance(first, offload._Offloaded) and first.tensor is None and first.host is not None
    for one, given in zip(packed[::-1], inputs[::-1], strict=True):
        assert torch.equal(context._unpack(one), given)
        assert torch.equal(context._unpack(one), given)  # whoever asks twice gets it twice


def test_a_models_loss_and_gradients_are_bit_for_bit_the_same() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(toy_text_config("llama", num_hidden_layers=4)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(5, 70, (2, 12))
    context = Noting(model.config.hidden_size)
    found = []
    for within in (nullcontext(), context):
        model.zero_grad()
        with within:
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert len(context.moved) >= 4 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
