"""What model is this, and is all of it there? Built on the meta device: nothing is allocated, everything is checked."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version

from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.kernels.attention_names import VARLEN, WHOLE_ROWS
from shardtune.model.families.family import Family, Wrapper
from shardtune.model.families.registry import family_for, family_of
from shardtune.model.model_outline import outline_of
from shardtune.model.quantized import fp8_candidates
from shardtune.model.safetensors_headers import StoredTensor
from shardtune.model.text_config import held_dtype, known_wrapper
from shardtune.model.unsuitable import quantisation
from shardtune.model.weight_mapping import WeightMapping, map_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig, PreTrainedModel

    from shardtune.model.outline import Outline


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device, what is known about it, and how its checkpoint fills it."""

    model: PreTrainedModel
    family: Family
    wrapper: Wrapper | None
    mapping: WeightMapping

    @property
    def layer_class(self) -> str | None:
        """The class that is sharded layer by layer, where the family knows it."""
        return self.family.decoder_layer.get(self.model.config.model_type)

    @property
    def outline(self) -> Outline:
        """Of the model before anything is done to it."""
        return outline_of(self.model, self.family, self.mapping.quantised)


def build_meta_model(section: ModelSection, folder: Path, stored: Mapping[str, StoredTensor]) -> MetaModel:
    """The model of `folder`'s config.json, with every tensor of `stored` mapped to its parameters.

    Raises:
        UserInputError: the architecture is unknown to the installed library or quantised in a way that is not read, or
            the checkpoint does not fit it.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantised = quantisation(section.model_name_or_path, raw)
    config = read_config(section, folder)
    wrapper = None
    text = config
    if getattr(config, "text_config", None) is not None and type(config).sub_configs:
        wrapper, text = _unwrap(section.model_name_or_path, config)
    model = _build(section, text, raw, stored)
    if section.weights == "random":
        return MetaModel(model, family_of(model), wrapper, WeightMapping({}))
    block = quantised.get("weight_block_size")
    mapping = map_weights(
        model,
        stored,
        prefixes=wrapper.stored if wrapper is not None else None,
        ignore=section.ignore_tensors,
        declared_block=tuple(block) if block else None,
    )
    return MetaModel(model, family_of(model), wrapper, mapping)


def fp8_blocks(meta_model: MetaModel) -> dict[str, tuple[int, int]]:
    """Which parameters are held in float8, and the block of each: as stored, or one scale per row where quantised here.

    In an FP8 checkpoint what is stored in full stays in full.
    """
    mapping = meta_model.mapping
    family = meta_model.family
    # Kernels read the weights of what is bypassed as they are.
    excluded = {name.removesuffix(".weight") for name in family.router} | set(family.bypassed)
    candidates = fp8_candidates(meta_model.model, excluded)
    stored = [name for name in candidates if name in mapping.quantised]
    if stored:
        return {name: mapping.block(name) for name in stored}
    return {name: (1, meta_model.model.get_parameter(name).shape[-1]) for name in candidates}


def read_config(section: ModelSection, folder: Path) -> PretrainedConfig:
    """The checkpoint's config.json as transformers reads it; a vision+text model's is that of the whole.

    Raises:
        UserInputError: the installed library cannot read it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = raw.get("model_type")
        family = family_for(str(kind))
        if family is not None and Version(transformers.__version__) < Version(family.min_transformers):
            raise _too_old(section.model_name_or_path, family) from error
        written = str(raw.get("transformers_version", "0"))
        unknown = kind is not None and "does not recognize this architecture" in str(error)
        newer = unknown and Version(written) > Version(transformers.__version__)
        raise UserInputError(
            f"'{section.model_name_or_path}' could not be loaded as a causal language model.",
            why=f"transformers {transformers.__version__} does not know the model type '{kind}'."
            if unknown
            else first_line(error),
            fix=f"The checkpoint was written with transformers {written}: install that version or a later one."
            if newer
            else "Check model.model_name_or_path and its config.json; a newer transformers may support this type.",
        ) from error


def _unwrap(name: str, config: PretrainedConfig) -> tuple[Wrapper, PretrainedConfig]:
    """The text model's config out of a vision+text one."""
    text = config.text_config
    wrapper = known_wrapper(name, config.model_type, text.model_type)
    text.tie_word_embeddings = config.tie_word_embeddings  # the wrapper owns the head
    if text.dtype is None:
        text.dtype = config.dtype
    text.name_or_path = config.name_or_path
    return wrapper, text


def _build(
    section: ModelSection, config: PretrainedConfig, raw: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    family = family_for(config.model_type)
    if family is not None and Version(transformers.__version__) < Version(family.min_transformers):
        raise _too_old(section.model_name_or_path, family)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # we read the codes ourselves
    named = str(config.dtype).removeprefix("torch.") if config.dtype is not None else None
    dtype: torch.dtype = getattr(torch, held_dtype(section, named, stored))
    # Ours are put in place when it is known how rows are laid out (train/build.py).
    ours = section.attn_implementation in ("auto", VARLEN, WHOLE_ROWS)
    # None: sdpa where the architecture has it, else eager (gpt-oss, Gemma 2).
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": None if ours else section.attn_implementation}
    try:
        with torch.device("meta"):
            if family is not None and not section.trust_remote_code:
                cls = getattr(importlib.import_module("transformers"), family.causal_lm[config.model_type])
                model: PreTrainedModel = cls._from_config(config, **settings)
            else:
                model = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=section.trust_remote_code, **settings
                )
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise UserInputError(
            f"'{section.model_name_or_path}' could not be loaded as a causal language model.",
            why=first_line(error),
            fix="Check model.model_name_or_path (a decoder-only language model is needed) and "
            "model.attn_implementation (auto picks one that the model supports).",
        ) from error
    for pattern, kept in model._get_dtype_plan(dtype).items():  # what must stay float32 whatever the rest is
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if pattern in name:
                tensor.data = tensor.data.to(kept)
    model.config.use_cache = False
    return model


def _too_old(name: str, family: Family) -> UserInputError:
    return UserInputError(
        f"'{name}' is a {family.name} model, which needs transformers {family.min_transformers} or later.",
        why=f"transformers {transformers.__version__} is installed; it lacks the model or computes it incorrectly.",
        fix=f"pip install 'transformers>={family.min_transformers}'",
    )


def first_line(error: BaseException) -> str:
    """What a library's error says, without the pages that follow."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    announced = lines[0].endswith(":")  # then the second line is what it says
    return " ".join(lines[: 2 if announced else 1])[:300]
