"""What does the host do between two steps? Nothing that walks through all modules: what they are is found out once."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from collections.abc import Callable

_TRAINS = attrgetter("training")


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """In the model's order. Of a sharded model: its shards, if nothing of it is gathered at this moment."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def spare_walks(model: nn.Module, trained: list[nn.Parameter]) -> None:
    """Let `train()` and `zero_grad()` of this one model do what they always do without a walk through its modules.

    transformers calls both in every step. A model of 32 layers with seven adapters each has 2,665 modules: the device
    would wait for tens of milliseconds, at each step, for nothing. To be called again if modules are added.

    Args:
        trained: All parameters that may have a gradient.
    """
    modules = list(model.modules())
    # Theirs does nothing to a module that trains already, but to ask each of its children.
    plain = (nn.Module.train, PreTrainedModel.train)
    particular = [module for module in modules if type(module).train not in plain]
    if model not in particular:
        model.train = _train(model, modules, particular)  # type: ignore[method-assign]
    model.zero_grad = _zero_grad(model, trained)  # type: ignore[method-assign]


def _train(model: nn.Module, modules: list[nn.Module], particular: list[nn.Module]) -> Callable[..., nn.Module]:
    def train(mode: bool = True) -> nn.Module:
        if not mode or not all(map(_TRAINS, modules)):
            return type(model).train(model, mode)
        for module in particular:  # what else they do when told so is theirs to know
            module.train()
        return model

    return train


def _zero_grad(model: nn.Module, trained: list[nn.Parameter]) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none:
            type(model).zero_grad(model, set_to_none)
            return
        for parameter in trained:
            parameter.grad = None

    return zero_grad
