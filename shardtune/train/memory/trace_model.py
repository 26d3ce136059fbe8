"""What do the layers of this very model keep? Traced now (`plan --exact`), for what the plan's table does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardtune.adapters.lora import add_lora
from shardtune.plan import activations as plan
from shardtune.train.build import fuse
from shardtune.train.memory.activation_table import TOKENS
from shardtune.train.memory.layer_trace import Kernels, TensorSize, trace_layer

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.model.meta_model import MetaModel
    from shardtune.plan.facts import Facts
    from shardtune.plan.work import Work


def trace_model(meta_model: MetaModel, config: RunConfig, facts: Facts, work: Work) -> list[plan.LayerActivations]:
    """Of the first layer of each kind in `facts`, adapted and fused as in the run. In bf16, as the table is.

    Args:
        meta_model: Is used up.
        config: With nothing left open.
    """
    model = meta_model.model
    layers = [model.get_submodule(name) for name in meta_model.outline.layers]
    shapes = [{name: tuple(p.shape) for name, p in layer.named_parameters()} for layer in layers]
    firsts = [layers[shapes.index(dict(kind.parameters))] for kind in facts.kinds]
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    adapted, _, _ = add_lora(model, config.lora, meta_model.family)
    fuse(adapted, config.train)
    mode: plan.Mode = "selective" if work.checkpointing == "selective" else "none"
    kernels = Kernels(compiled=work.compiled, packed=work.packed, mode=mode)
    found = []
    for layer in firsts:
        trace = trace_layer(model, layer, kernels, TOKENS)
        moments = [plan.Moment(_bytes(one.alive), f"{one.weight} 1" if one.weight else "") for one in trace.moments]
        found.append(plan.LayerActivations(_bytes(trace.kept), tuple(moments)))
    return found


def _bytes(tensors: Iterable[TensorSize]) -> plan.Bytes:
    """What grows with the tokens, and what does not."""
    of_token = of_layer = 0.0
    for tensor in tensors:
        if tensor.numel % TOKENS:
            of_layer += tensor.numel * tensor.itemsize
        else:
            of_token += tensor.numel / TOKENS * tensor.itemsize
    return plan.Bytes({"1": of_token}, {"1": of_layer})
