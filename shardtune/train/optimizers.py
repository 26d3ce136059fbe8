"""Which optimizer takes the steps? torch's own classes, by the names of `config/optimizers.py`, on this rank's shards.

torch would step on sharded tensors too; but with hundreds of them each operation costs tens of milliseconds in which it
works out, tensor by tensor, that their shards fit together. For what FSDP2 has sharded they always do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.config.optimizers import OPTIMIZERS as SPECS
from shardtune.config.schema import TrainSection
from shardtune.train.shards import local_shard

# As transformers' Trainer decides: neither these names nor anything in an nn.LayerNorm is decayed.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class LocalShards(torch.optim.Optimizer):
    """Lets an elementwise optimizer of torch, of which this is a mixin, step on this rank's shards.

    Its state is made of tensors sharded like the parameters, the same as that of torch's own class.
    """

    def _init_group(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor], *state: list[Any]
    ) -> Any:
        kinds = super()._init_group(group, parameters, gradients, *state)  # type: ignore[misc]
        if all(map(_same_sharding, parameters, gradients)):
            for tensors in (parameters, gradients, *state):  # lists of this one step
                tensors[:] = [local_shard(tensor) for tensor in tensors]
        return kinds


class ShardSGD(LocalShards, torch.optim.SGD):
    """SGD stores a momentum that it has just made under the tensor it stepped on, the shard: it belongs to the
    parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_step_post_hook(_keep_momentum)


def _keep_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if not isinstance(parameter, DTensor):
            continue
        of_shard = optimizer.state.pop(local_shard(parameter), None)
        if of_shard is not None and "momentum_buffer" not in optimizer.state[parameter]:
            momentum = DTensor.from_local(
                of_shard["momentum_buffer"], parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            optimizer.state[parameter]["momentum_buffer"] = momentum


def _shard_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    kind = getattr(torch.optim, name)
    return ShardSGD if kind is torch.optim.SGD else type(f"Shard{name}", (LocalShards, kind), {})


_CLASSES = {name: _shard_class(name) for name in {spec.torch_class for spec in SPECS.values()}}
OPTIMIZERS = {name: _CLASSES[spec.torch_class] for name, spec in SPECS.items()}


def build_optimizer(model: nn.Module, train: TrainSection, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of what trains in `model`, at the peak learning rate. The config has been checked."""
    name, spec = train.optim, SPECS[train.optim]
    settings: dict[str, Any] = spec.arguments.model_validate(train.optim_args).model_dump()
    if spec.uses_adam_settings:
        settings |= {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    if name == "adamw_torch_fused" or (name in ("adamw_torch", "adam") and device.type != "cpu"):
        settings["fused"] = True  # the same state as without: a run may switch over
    return OPTIMIZERS[name](_groups(model, train.weight_decay), lr=train.learning_rate, **settings)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that are decayed, and those that are not, as transformers' Trainer groups them."""
    of_norms = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = id(parameter) in of_norms or _NOT_DECAYED.search(name.lower())
            (others if exempt else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _same_sharding(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return False
    one, other = parameter._spec, gradient._spec
    return one is other or (one.mesh == other.mesh and one.placements == other.placements)
