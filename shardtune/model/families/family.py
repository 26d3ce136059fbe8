"""What do we know about an architecture? The facts one family file states, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from shardtune.model.families.layer_types import LayerTypes

_NOTHING: Mapping[str, tuple[str, ...]] = MappingProxyType({})

# What computes in another way than transformers does, and is used only where it was compared with transformers:
# - packing: several documents in one row, as transformers computes such a row (eager and sdpa attention);
# - varlen: `kernels.varlen` for packed rows; whole_rows: `kernels.whole_rows` for others;
# - fused_loss: the head and the loss together (`train.fused_loss`); fused_experts: grouped products (`model.experts`);
# - compile: each decoder layer compiled; selective: a layer's products kept, the rest computed again.
FastPath = Literal["packing", "varlen", "whole_rows", "fused_loss", "fused_experts", "compile", "selective"]
# Of a decoder whose tokens see each other through softmax attention alone, under masks that transformers makes from
# `position_ids`, and that adds nothing to the attention scores.
SOFTMAX_ATTENTION: frozenset[FastPath] = frozenset(get_args(FastPath))
_CLAIMS: Mapping[FastPath, str] = {
    "packing": "documents in one row stay separate",
    "varlen": "variable-length attention gives the same results",
    "whole_rows": "attention without a mask gives the same results",
    "fused_loss": "its loss depends on the head only",
    "fused_experts": "grouped products give the same expert outputs",
    "compile": "its compiled layers give the same results",
    "selective": "selective activation checkpointing gives the same gradients",
}
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class Wrapper:
    """A vision+text model that packages the text model of a family.

    Args:
        model_type: `model_type` in the wrapper's config.json; its `text_config` is the text model's config.
        class_name: The wrapper's class in transformers.
        stored: Prefixes of names in the checkpoint, and the text model's prefix each stands for. A stored name that
            begins with none of them belongs to the vision part and is never read.
        served: Prefixes of the text model's names, and the wrapper model's prefix each stands for: where an adapter
            of the text model belongs when the whole wrapper is served.
    """

    model_type: str
    class_name: str
    stored: Mapping[str, str]
    served: Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """One architecture. Module and parameter names are those below a decoder layer, such as `self_attn.q_proj`.

    Args:
        name: What we call it.
        model_types: `model_type` of the text configs that belong to it.
        causal_lm: The class in transformers that is trained, by model type. (The auto classes do not know all.)
        decoder_layer: The class that is sharded layer by layer, by model type.
        attention: Linear modules of the attention.
        mlp: Linear modules of dense feed-forward blocks (in a mixture of experts, of those layers that are dense).
        shared_experts: Linear modules every token passes beside its routed experts.
        experts: Fused 3-D parameters of the routed experts, (experts, out, in).
        router: What scores the experts: a module, or the parameter it holds.
        other: Linear modules that are none of these: `all-linear` or their name reaches them.
        bypassed: Linear modules whose weight is read without calling them: an adapter there would not train.
        outside: Full names of linear modules outside of decoder layers, but for the head.
        buffers: Tensors of a decoder layer that checkpoints store and that are no parameters.
        layer_types: Which kind each layer is where config.json does not list them, by model type.
        own_attention: The attention code that transformers chooses.
        router_loss: Its forward can add a load-balancing loss of its routers, computed in the usual way.
        aliases: What a name that people copy from elsewhere means here, e.g. `q_proj` under MLA.
        wrappers: Vision+text models that package it.
        min_transformers: The oldest transformers that has it and computes it rightly.
        pitfalls: What goes wrong with it elsewhere; shown by `docs/families.md`.
        proven: What `tests/support` compares with transformers' own forward pass. Nothing else is ever chosen by
            `auto`; a file that says nothing is treated as an architecture that nobody has looked at.
        unsupported: Why another path does not compute what the model means, where that is known.
        inspected: Not from a file: these are the findings of a look at the model (`generic.inspect_family`).
        doubts: What that look could not place. Always empty in a file.
    """

    name: str
    model_types: tuple[str, ...]
    causal_lm: Mapping[str, str]
    decoder_layer: Mapping[str, str]
    attention: tuple[str, ...]
    mlp: tuple[str, ...] = ()
    shared_experts: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    bypassed: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    layer_types: Mapping[str, LayerTypes] = field(default_factory=lambda: MappingProxyType({}))
    own_attention: str = "sdpa"
    router_loss: bool = False
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NOTHING)
    wrappers: tuple[Wrapper, ...] = ()
    min_transformers: str = "5.0.0"
    pitfalls: tuple[str, ...] = ()
    proven: frozenset[FastPath] = frozenset()
    unsupported: Mapping[FastPath, str] = field(default_factory=lambda: MappingProxyType({}))
    inspected: bool = False
    doubts: tuple[str, ...] = ()

    def why_not(self, path: FastPath, config: Any) -> str | None:
        """Why a model of this family does not take a path; None = it does.

        Args:
            config: transformers', or config.json's content with its defaults.
        """
        if path in self.unsupported:
            return self.unsupported[path]
        if path not in self.proven:
            lacks = f"there is no family file for {self.name} that says"
            silent = f"the family file of {self.name} does not say"
            return f"{lacks if self.inspected else silent} that {_CLAIMS[path]}"
        kinds = config.get("layer_types") if isinstance(config, Mapping) else getattr(config, "layer_types", None)
        other = sorted(set(kinds or ()) - _KNOWN_LAYERS)
        if other and path in ("packing", "varlen", "whole_rows"):
            return f"layers of type {', '.join(other)} are not known to keep documents separate"
        return None
