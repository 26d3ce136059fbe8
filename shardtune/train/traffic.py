"""What does a step of this run send? The sizes of its model, for the plan's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardtune.parallel.shard import decoder_layers, gathered_bytes
from shardtune.plan.traffic import ModelBytes, StepTraffic, step_traffic

if TYPE_CHECKING:
    from torch import nn

    from shardtune.config.schema import RunConfig
    from shardtune.parallel.mesh import Mesh


@dataclass(frozen=True)
class Traffic:
    """Of a step as it is sharded, and as it would be with full sharding."""

    sent: StepTraffic
    full: StepTraffic


def model_bytes(model: nn.Module, config: RunConfig, layer_class: str | None) -> ModelBytes:
    """What collectives would send of a model that is not sharded yet."""
    dtype = torch.bfloat16 if config.train.bf16 else None
    layers = decoder_layers(model, config.parallel.transformer_layer_cls_to_wrap or layer_class)
    frozen = gathered_bytes(model, dtype)
    in_layers = sum(gathered_bytes(layer, dtype) for layer in layers)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gathered = 2 if config.train.bf16 else 4
    return ModelBytes(
        in_layers, frozen - in_layers, trained, gathered, 4 if config.parallel.reduce_dtype == "float32" else 2
    )


def traffic_of(sizes: ModelBytes, config: RunConfig, mesh: Mesh, *, full_reshards: bool) -> Traffic:
    """Args:
    full_reshards: Whether full sharding would gather weights again for backward.
    """

    def sent(replicas: int, reshards: bool) -> StepTraffic:
        return step_traffic(
            sizes,
            replicas=replicas,
            nodes=sorted(mesh.nodes),
            micro_batches=config.train.accumulation,
            reshard_after_forward=reshards,
            offload_params=config.parallel.offload_params is True and mesh.device_type == "cuda",
            adapters="sharded" if mesh.splits_adapters_only else "replicated",
        )

    return Traffic(sent(mesh.replicas, bool(config.parallel.reshard_after_forward)), sent(1, full_reshards))
