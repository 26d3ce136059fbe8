"""What is a model made of that was built (on any device, also meta)? The same `Outline` that its files give."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from shardtune.model.experts import fused_experts, why_not_grouped
from shardtune.model.families.family import Family
from shardtune.model.outline import Outline
from shardtune.model.router_loss import router_loss_of
from shardtune.model.stored_names import SCALE
from shardtune.model.text_config import completed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def outline_of(model: PreTrainedModel, family: Family, quantised: Collection[str] = ()) -> Outline:
    """Args:
    model: Without adapters.
    quantised: Parameters that the checkpoint stores in float8.
    """
    kind = model.config.model_type
    modules = {name: type(module).__name__ for name, module in model.named_modules() if name}
    names = {id(module): name for name, module in model.named_modules()}
    layer_class = family.decoder_layer.get(kind)
    layer_classes = {layer_class} if layer_class else set(model._no_split_modules or ())
    return Outline(
        family=family,
        model_type=kind,
        model_class=type(model).__name__,
        config=_config(model),
        dtype=str(model.dtype).removeprefix("torch."),
        parameters={name: tuple(p.shape) for name, p in model.named_parameters() if not name.endswith(SCALE)},
        quantised=frozenset(quantised),
        linear=frozenset(name for name, module in model.named_modules() if isinstance(module, nn.Linear)),
        layers=tuple(name for name, found in modules.items() if found in layer_classes),
        embedding=names[id(model.get_input_embeddings())],
        head=names.get(id(model.get_output_embeddings()), ""),
        modules=modules,
        own_attention=model.config._attn_implementation,
        router_loss=router_loss_of(model),
        expert_obstacle=_expert_obstacle(model, family),
    )


def _expert_obstacle(model: PreTrainedModel, family: Family) -> str | None:
    # Convolutions have tensors of three dimensions as well.
    experts = [module for module in fused_experts(model) if not isinstance(module, nn.Conv1d)]
    found = next((why for why in map(why_not_grouped, experts) if why is not None), None)
    return None if found is None else family.unsupported.get("fused_experts", f"they have {found}")


def _config(model: PreTrainedModel) -> dict[str, Any]:
    text = model.config.get_text_config()
    # Some classes compute it, so that it is not among what they would write.
    return completed({**text.to_dict(), "layer_types": getattr(text, "layer_types", None)})
