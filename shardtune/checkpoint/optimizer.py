"""What has the optimizer learnt? Whole tensors by parameter name, so that any number of processes can load them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.checkpoint.adapter import gather_tensors, shard_like
from shardtune.errors import ShardtuneError


def gather_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, torch.Tensor]:
    """State such as AdamW's, named `exp_avg/<parameter>`. A collective; of the adapter's size, never the base's.

    Args:
        keep: False on ranks that only take part.

    Raises:
        ShardtuneError: the optimizer keeps state that is not shaped like its parameter, or does not have a parameter.
    """
    return gather_tensors(_named_state(model, optimizer), keep=keep)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put what `gather_optimizer` gave into a fresh optimizer. A collective; ranks but 0 may give `meta` tensors.

    Learning rate, betas and the like stay as the optimizer has them: they are the config's.

    Raises:
        ShardtuneError: the state is not of this model and optimizer.
    """
    numbers = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    parameters = dict(_trainable(model))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for label, whole in tensors.items():
        key, _, name = label.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (whole.dim() and whole.shape != parameter.shape):
            raise ShardtuneError(
                "The saved optimizer state does not fit the model.",
                why=f"'{name}' is {'unknown' if parameter is None else f'of shape {list(whole.shape)} there'}.",
                fix="Continue with the lora settings the run was started with.",
            )
        value = shard_like(whole, parameter) if whole.dim() else whole.clone()  # steps count up in place
        state.setdefault(numbers[id(parameter)], {})[key] = value
    if state and len(state) != len(parameters):
        raise ShardtuneError(
            "The saved optimizer state does not fit the model.",
            why=f"It is of {len(state)} tensors, the model trains {len(parameters)}.",
            fix="Continue with the lora settings the run was started with.",
        )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in state.get(number, {}).items():
            if not value.dim() and key != "step":  # NAdam's: torch would move it to the GPU, and round it to bf16
                optimizer.state[parameter][key] = value


def _named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in _trainable(model):
        if id(parameter) not in owned:  # gathered for a forward pass, it has no state: a resumed run would lose it
            raise ShardtuneError(
                f"The optimizer does not know the trained parameter {name}.",
                why="It is still gathered, or was replaced after training began.",
                fix="Please report this; the checkpoint is not written, the ones before are good.",
            )
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if value is None:
                continue  # SGD without momentum
            if not isinstance(value, torch.Tensor) or (value.dim() and not isinstance(value, DTensor)):
                raise ShardtuneError(
                    f"{type(optimizer).__name__} keeps state that cannot be saved: '{key}' of {name}.",
                    why="It is neither a number nor sharded like its parameter.",
                    fix="Use train.optim: adamw_torch.",
                )
            yield f"{key}/{name}", value


def _trainable(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
