"""Which family is a model of? Finds the family files by listing this package, so that adding one is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

import shardtune.model.families as package
from shardtune.model.families.family import Family, Wrapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Decoder layers that stand in copied accelerate files, of models without a file here.
_COPIED_LAYERS = ("BertLayer", "BloomBlock", "FalconDecoderLayer", "GPT2Block", "GPTJBlock", "GPTNeoXLayer",
                  "GemmaDecoderLayer", "OPTDecoderLayer", "T5Block")  # fmt: skip
_NOT_FAMILIES = frozenset(
    {"config_defaults", "family", "generic", "layer_types", "names", "page", "registry", "wrappers"}
)


@cache
def families() -> tuple[Family, ...]:
    """Every family that has a file, by name. Needs no torch."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names if name not in _NOT_FAMILIES]
    return tuple(module.FAMILY for module in modules)


def family_for(model_type: str) -> Family | None:
    """The family of a text model's `model_type`, if it has a file."""
    return next((family for family in families() if model_type in family.model_types), None)


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model: from its file, or from a look at the model itself (which may be on the meta device)."""
    known = family_for(model.config.model_type)
    # Code that ships with a checkpoint may call itself anything; what a file states is proven of transformers' class.
    own = type(model).__module__.startswith("transformers.")
    if known is not None and own and type(model).__name__ == known.causal_lm[model.config.model_type]:
        return known
    from shardtune.model.families.generic import inspect_family

    return inspect_family(model)


def known_decoder_layers() -> frozenset[str]:
    """Classes that are the decoder layer of some architecture. Needs no torch."""
    return frozenset(_COPIED_LAYERS).union(*(family.decoder_layer.values() for family in families()))


def wrapper_for(wrapper_model_type: str, text_model_type: str) -> Wrapper | None:
    """The vision+text model of that type that packages that text model, if we know how it does."""
    family = family_for(text_model_type)
    wrappers = family.wrappers if family is not None else ()
    return next((wrapper for wrapper in wrappers if wrapper.model_type == wrapper_model_type), None)
