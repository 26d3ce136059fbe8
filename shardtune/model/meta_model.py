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
from shardtune.model.families.registry import family_for, family_of, wrapper_for
from shardtune.model.safetensors_headers import StoredTensor
from shardtune.model.weight_mapping import WeightMapping, map_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig, PreTrainedModel

_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_UNSUPPORTED = {
    "gptq": "whose format is not supported",
    "awq": "whose format is not supported",
    "bitsandbytes": "whose 4-bit and 8-bit formats are not supported",
    "compressed-tensors": "whose formats are not supported",
    "mxfp4": "whose 4-bit format is not supported",
}


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


def build_meta_model(section: ModelSection, folder: Path, stored: Mapping[str, StoredTensor]) -> MetaModel:
    """The model of `folder`'s config.json, with every tensor of `stored` mapped to its parameters.

    Raises:
        UserInputError: the architecture is unknown to the installed library or quantised in a way that is not read, or
            the checkpoint does not fit it.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantised = _quantisation(section.model_name_or_path, raw)
    config = _config(section, folder, raw)
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


def _quantisation(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    inner = raw.get("text_config") or {}
    found: dict[str, Any] = raw.get("quantization_config") or inner.get("quantization_config") or {}
    method = found.get("quant_method", "fp8" if found else None)
    if method not in (None, "fp8"):
        raise UserInputError(
            f"'{name}' is quantised with {method}, {_UNSUPPORTED.get(method, 'which is not supported')}.",
            why="LoRA needs gradients through the base weights; supported are checkpoints in bf16, fp16, fp32 and FP8 "
            "(quant_method: fp8).",
            fix="Use a bf16 checkpoint (the original, or a dequantised one); model.base_precision: fp8 quantises it to "
            "one byte per weight while loading.",
        )
    return found


def _config(section: ModelSection, folder: Path, raw: dict[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
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
    wrapper = wrapper_for(config.model_type, text.model_type)
    if wrapper is None:
        raise UserInputError(
            f"'{name}' wraps a text model ({text.model_type}) in {config.model_type}, which is not supported.",
            why="Only the text model is trained, and the names of its weights in this wrapper are not known.",
            fix="Use the text model's own checkpoint, or describe the wrapper in its family's file "
            "(shardtune/model/families).",
        )
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
    dtype = _DTYPES.get(section.torch_dtype) or _own_dtype(config, stored)
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


def _own_dtype(config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The checkpoint's own, by its config or its files; bfloat16 for float16, which would need loss scaling."""
    named = config.dtype
    found: torch.dtype = (getattr(torch, named) if isinstance(named, str) else named) or _most_common_dtype(stored)
    return torch.float32 if found in (torch.float32, torch.float64) else torch.bfloat16


def _most_common_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The dtype most bytes are stored in; bfloat16 where that is float8."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in stored.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    found = max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)
    return found if found in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16


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
