"""What do we know about an architecture? The facts one family file states, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NOTHING: Mapping[str, tuple[str, ...]] = MappingProxyType({})


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
        meanings: What a name that people copy from elsewhere means here, e.g. `q_proj` under MLA.
        wrappers: Vision+text models that package it.
        min_transformers: The oldest transformers that has it and computes it rightly.
        pitfalls: What goes wrong with it elsewhere; shown by `docs/families.md`.
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
    meanings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NOTHING)
    wrappers: tuple[Wrapper, ...] = ()
    min_transformers: str = "5.0.0"
    pitfalls: tuple[str, ...] = ()
    inspected: bool = False
    doubts: tuple[str, ...] = ()
