"""How do the weights get here? Loads a causal language model and its tokenizer, and proves nothing was left random."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from shardtune.config.schema import ModelSection
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.model.locate import check_model_folder, local_or_hub, looks_local

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_DTYPES: dict[str, torch.dtype | str] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "auto": "auto"}


def load_model(section: ModelSection) -> PreTrainedModel:
    """The model on the CPU, in the dtype asked for, every parameter read from the checkpoint.

    Raises:
        UserInputError: the folder or hub name is not a causal language model that transformers can load.
        ShardtuneError: a parameter has no counterpart in the checkpoint (transformers would leave it random).
    """
    from transformers import AutoModelForCausalLM

    check_model_folder(section.model_name_or_path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            local_or_hub(section.model_name_or_path),
            revision=section.revision or "main",
            dtype=_DTYPES[section.torch_dtype],
            attn_implementation="sdpa" if section.attn_implementation == "auto" else section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, with names; transformers would point to a report we silence
        )
    except SafetensorError as error:
        raise UserInputError(
            f"The weights of '{section.model_name_or_path}' are damaged: {_damaged(section.model_name_or_path)}.",
            why=_first_line(error),
            fix="Copy or download them again (a file of a few lines is git-lfs's pointer: run git lfs pull).",
        ) from error
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise UserInputError(
            f"'{section.model_name_or_path}' could not be loaded as a causal language model.",
            why=_first_line(error),
            fix="Check model.model_name_or_path, model.revision and model.attn_implementation; without a network, use "
            "a local folder.",
        ) from error
    model: PreTrainedModel = loaded[0]
    _refuse_random_weights(section.model_name_or_path, loaded[1])
    model.config.use_cache = False
    return model


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer; where it has no padding token the end-of-sequence one pads (labels are masked by position)."""
    from transformers import AutoTokenizer

    source = section.tokenizer_name_or_path or section.model_name_or_path
    key = "model.tokenizer_name_or_path" if section.tokenizer_name_or_path else "model.model_name_or_path"
    if looks_local(source) and not Path(source).expanduser().exists():
        raise UserInputError(
            f"The tokenizer's folder '{source}' does not exist.",
            why=f"{key} is written like a local path, so the hub is not asked.",
            fix=f"Set {key} to a folder with tokenizer.json, or to a hub name such as org/model.",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            local_or_hub(source),
            # model.revision is one of the model's repository; another one may not have it.
            revision=(section.revision or "main") if source == section.model_name_or_path else "main",
            trust_remote_code=section.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserInputError(
            f"No tokenizer could be loaded from '{source}'.",
            why=_first_line(error),
            fix=f"Set model.tokenizer_name_or_path to a folder with tokenizer.json, or check {key}.",
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise UserInputError(
                f"The tokenizer of '{source}' has neither a padding nor an end-of-sequence token.",
                fix="Set pad_token and eos_token in its tokenizer_config.json.",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _refuse_random_weights(name: str, info: dict) -> None:
    # transformers only prints a report when a checkpoint's names do not fit: the model comes out random.
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(
        f"{key} ({list(there)} there, {list(here)} in the model)"
        for key, there, here in info.get("mismatched_keys") or ()
    )
    if missing or mismatched:
        bad = mismatched + missing
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise ShardtuneError(
            f"{len(bad)} parameters of the model are not in the checkpoint '{name}' and would stay random: {shown}.",
            why="The checkpoint belongs to another architecture, or packages this one under other names.",
            fix="Point model.model_name_or_path to the checkpoint of the language model itself.",
        )
    if info.get("unexpected_keys"):
        extra = sorted(info["unexpected_keys"])
        log.warning("%d tensors of the checkpoint are not part of the model, e.g. %s", len(extra), extra[0])


def _damaged(name: str) -> str:
    """Which file it is: the error of safetensors does not say."""
    for file in sorted(Path(local_or_hub(name)).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return f"{file.name} ({file.stat().st_size:,} bytes) is not a whole safetensors file"
    return "a file is not a whole safetensors file"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    announced = lines[0].endswith(":")  # then the second line is what it says
    return " ".join(lines[: 2 if announced else 1])[:300]
