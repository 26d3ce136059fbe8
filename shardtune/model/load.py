"""How do the weights get here? Finding a checkpoint, its tokenizer, and the whole model where one process wants it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.model.locate import check_model_folder, local_or_hub, looks_local
from shardtune.model.meta_model import build_meta_model, first_line
from shardtune.model.new_tokens import NewTokens, add_new_tokens
from shardtune.model.safetensors_headers import read_headers
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import load_shards, local_shards, materialize

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Repositories carry the weights in other forms too; none of these is read.
_OTHER_FORMS = ["consolidated*", "original/*", "onnx/*", "*.bin", "*.pth", "*.gguf", "*.msgpack", "*.h5"]


def model_folder(section: ModelSection) -> Path:
    """The local folder of the checkpoint; a hub name is looked up in the cache, or downloaded.

    Raises:
        UserInputError: it is not there.
    """
    stored = section.weights == "checkpoint"
    check_model_folder(section.model_name_or_path, weights=stored)
    if looks_local(section.model_name_or_path):
        return Path(section.model_name_or_path).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    code = [] if section.trust_remote_code else ["*.py"]
    try:
        found = snapshot_download(
            section.model_name_or_path,
            revision=section.revision or "main",
            ignore_patterns=[*_OTHER_FORMS, *code, *([] if stored else ["*.safetensors"])],
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise UserInputError(
            f"'{section.model_name_or_path}' is neither a local folder nor a model the hub could give.",
            why=first_line(error),
            fix="Check model.model_name_or_path and model.revision; without a network, use a local folder.",
        ) from error
    check_model_folder(found, weights=stored)
    return Path(found)


def load_model(section: ModelSection) -> PreTrainedModel:
    """The whole model on the CPU, in the dtype asked for, every parameter read from the checkpoint.

    Training does not come here: it shards the model before a byte is read (`train/weights.py`).

    Raises:
        UserInputError: the folder is not a causal language model, or its checkpoint does not fit it.
    """
    folder = model_folder(section)
    meta_model = build_meta_model(section, folder, read_headers(folder))
    materialize(meta_model.model, meta_model.model, torch.device("cpu"))
    with ShardReader(meta_model.mapping) as reader:
        load_shards(local_shards(meta_model.model, meta_model.mapping), reader)
    return meta_model.model


def load_tokenizer(section: ModelSection, folder: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer with `model.new_tokens` in it."""
    return tokenizer_and_new_tokens(section, folder)[0]


def tokenizer_and_new_tokens(
    section: ModelSection, folder: Path | None = None
) -> tuple[PreTrainedTokenizerBase, NewTokens]:
    """The tokenizer, and which of its tokens `model.new_tokens` means.

    Where it has no padding token the end-of-sequence one pads (labels are masked by position).

    Args:
        folder: Where the model's files are, if not where its name says (a copy of those of rank 0).
    """
    from transformers import AutoTokenizer

    own = section.tokenizer_name_or_path
    source = own or str(folder or section.model_name_or_path)
    key = "model.tokenizer_name_or_path" if own else "model.model_name_or_path"
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
            why=first_line(error),
            fix=f"Set model.tokenizer_name_or_path to a folder with tokenizer.json, or check {key}.",
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise UserInputError(
                f"The tokenizer of '{source}' has neither a padding nor an end-of-sequence token.",
                fix="Set pad_token and eos_token in its tokenizer_config.json.",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, add_new_tokens(tokenizer, section.new_tokens)
