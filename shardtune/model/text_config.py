"""What does config.json say of the text model? Its own keys, a wrapper's, and transformers' defaults. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError
from shardtune.model.families.config_defaults import config_defaults
from shardtune.model.families.family import Wrapper
from shardtune.model.families.registry import family_for, wrapper_for

if TYPE_CHECKING:
    from shardtune.config.schema import ModelSection
    from shardtune.model.safetensors_headers import StoredTensor

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of one number; files have either
_REACH = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def text_config(name: str, raw: Mapping[str, Any]) -> tuple[Wrapper | None, dict[str, Any]]:
    """The wrapper around the text model, if there is one, and the text model's config with its defaults.

    Args:
        name: The model's, for errors.
        raw: The content of config.json.

    Raises:
        UserInputError: a wrapper whose names are not known.
    """
    kind, inner = str(raw.get("model_type")), raw.get("text_config")
    if not isinstance(inner, dict) or family_for(kind) is not None:
        return None, completed(raw)
    wrapper = known_wrapper(name, kind, str(inner.get("model_type")))
    tied = {**config_defaults(kind), **raw}.get("tie_word_embeddings")  # the wrapper owns the head
    return wrapper, completed({**inner, "tie_word_embeddings": tied, "dtype": _dtype(inner) or _dtype(raw)})


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's config with what its class fills in, under the names of today."""
    kind = str(raw.get("model_type"))
    config: dict[str, Any] = {**config_defaults(kind), **raw, "dtype": _dtype(raw)}
    experts = next((raw[name] for name in EXPERT_COUNTS if raw.get(name) is not None), None)
    if experts is not None:  # a default stands under one name where the file has another
        config |= {name: experts for name in EXPERT_COUNTS if name in config}
    if "tie_embedding" in raw:  # LFM2's first files
        config["tie_word_embeddings"] = raw["tie_embedding"]
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config.get("num_attention_heads")
    family = family_for(kind)
    if not config.get("layer_types") and family is not None and kind in family.layer_types:
        config["layer_types"] = family.layer_types[kind](config)
    return config


def window(config: Mapping[str, Any], layer: int) -> int | None:
    """How far back a token of a layer sees; None = all the way."""
    kinds = config.get("layer_types")
    reach = config.get(_REACH.get(kinds[layer] if kinds else "sliding_attention", ""))
    return int(reach) if reach is not None else None


def sees_whole_rows(config: Mapping[str, Any], longest: int) -> bool:
    """Whether a token sees all tokens before it, in every layer, in rows of up to `longest` tokens."""
    reach = [config.get(name) for name in _REACH.values()]
    kinds = set(config.get("layer_types") or ())
    return all(far is None or far >= longest for far in reach) and kinds <= {"full_attention"}


def known_wrapper(name: str, kind: str, text_kind: str) -> Wrapper:
    """How a vision+text model of type `kind` packages its text model.

    Raises:
        UserInputError: nobody has described it.
    """
    wrapper = wrapper_for(kind, text_kind)
    if wrapper is None:
        raise UserInputError(
            f"'{name}' wraps a text model ({text_kind}) in {kind}, which is not supported.",
            why="Only the text model is trained, and the names of its weights in this wrapper are not known.",
            fix="Use the text model's own checkpoint, or describe the wrapper in its family's file "
            "(shardtune/model/families).",
        )
    return wrapper


def held_dtype(section: ModelSection, named: str | None, stored: Mapping[str, StoredTensor]) -> str:
    """What the weights are built in: as asked, or the checkpoint's own, by its config or its files.

    bfloat16 for float16, which would need loss scaling.
    """
    if section.torch_dtype != "auto":
        return section.torch_dtype
    return "float32" if (named or _most_common_dtype(stored)) in ("float32", "float64") else "bfloat16"


def _most_common_dtype(stored: Mapping[str, StoredTensor]) -> str | None:
    """The dtype most bytes are stored in."""
    sizes: dict[str, int] = {}
    for tensor in stored.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _dtype(raw: Mapping[str, Any]) -> str | None:
    found = raw.get("dtype") or raw.get("torch_dtype")
    return str(found).removeprefix("torch.") if found is not None else None
