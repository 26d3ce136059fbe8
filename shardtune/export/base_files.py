"""Which other files leave with the weights? The base's, the tokenizer the model was trained with, an edited config."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.data.chat import read_template
from shardtune.errors import UserInputError
from shardtune.inference.load import has_tokenizer, load_tuned_tokenizer

if TYPE_CHECKING:
    from shardtune.export.request import ExportLog
    from shardtune.inference.source import TunedModel

BASE_CARD = "README-base.md"
# Weights in other forms, what lists them, and what a download leaves.
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|msgpack|h5|onnx|ckpt|index\.json)|\..*")
_NOT_COPIED = ("config.json", "adapter_config.json")  # the second would make transformers look for an adapter
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt",
)  # fmt: skip
_OTHER_VOCABULARIES = ("tekken.json", "tokenizer.model")  # of other libraries: they do not know new tokens
_LICENCE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY|COPYING).*", re.IGNORECASE)
_TEMPLATES = "additional_chat_templates"


def copy_base_files(base: Path, folder: Path, *, dequantised: bool) -> None:
    """Everything of the base that is neither weights nor config.json. Its README.md becomes README-base.md."""
    for file in sorted(base.iterdir()):
        if not file.is_file() or _WEIGHTS.fullmatch(file.name) or file.name in _NOT_COPIED:
            continue
        if file.name == "params.json" and dequantised and "quantization" in _json(file):
            continue  # of the form with another name (consolidated.safetensors), and untrue now
        shutil.copyfile(file, folder / (BASE_CARD if file.name == "README.md" else file.name))
    if (base / _TEMPLATES).is_dir():
        shutil.copytree(base / _TEMPLATES, folder / _TEMPLATES)


def copy_tokenizer(base: Path, folder: Path) -> None:
    """The base's, as it is."""
    for name in (*_TOKENIZER, *_OTHER_VOCABULARIES):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def copy_licences(base: Path, folder: Path) -> None:
    for file in sorted(base.iterdir()):
        if file.is_file() and _LICENCE.fullmatch(file.name):
            shutil.copyfile(file, folder / file.name)


def check_tokenizer(tuned: TunedModel, base: Path) -> None:
    """Raises:
    UserInputError: files of the tokenizer are missing beside the adapter.
    """
    if has_tokenizer(tuned.adapter):
        load_tuned_tokenizer(tuned, base)


def write_tokenizer(tuned: TunedModel, base: Path, folder: Path, *, grown: bool) -> None:
    """Put the tokenizer that the model was trained with into `folder`, where it is not the base's as it is."""
    files = _TOKENIZER if has_tokenizer(tuned.adapter) else ()
    own = [tuned.adapter / name for name in files if (tuned.adapter / name).is_file()]
    changed = bool(tuned.base.new_tokens or tuned.base.tokenizer_name_or_path)
    if own or changed:
        for name in _TOKENIZER:
            (folder / name).unlink(missing_ok=True)
        if own:
            for file in own:
                shutil.copyfile(file, folder / file.name)
            if (tuned.adapter / _TEMPLATES).is_dir():
                shutil.rmtree(folder / _TEMPLATES, ignore_errors=True)
                shutil.copytree(tuned.adapter / _TEMPLATES, folder / _TEMPLATES)
        else:
            load_tuned_tokenizer(tuned, base).save_pretrained(folder)
    if grown or changed:
        for name in _OTHER_VOCABULARIES:
            if name not in {file.name for file in own}:
                (folder / name).unlink(missing_ok=True)


def trained_template(tuned: TunedModel, log: ExportLog) -> str | None:
    """The chat template of training, where `data.chat_template` named another than the tokenizer's."""
    asked = tuned.config.data.chat_template if tuned.config is not None else None
    if asked is None:
        return None
    try:
        return read_template(asked)
    except UserInputError as error:
        log.warn(
            f"The chat template of training is not written: {error.what} {error.why} The tokenizer has the base's."
        )
        return None


def write_chat_template(tuned: TunedModel, folder: Path, log: ExportLog) -> None:
    """Put `trained_template` beside the tokenizer's files."""
    source = trained_template(tuned, log)
    if source is None:
        return
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")  # goes before that in tokenizer_config.json
    shutil.rmtree(folder / _TEMPLATES, ignore_errors=True)


def merged_config(
    base: Path, *, dequantised: bool, untied: bool, dtype: str | None, rows: int | None
) -> dict[str, Any]:
    """The base's config.json with what merging changes.

    Args:
        dtype: torch's name of what the weights are in now; None: as before.
        rows: Of the embedding, where it has grown.
    """
    config = _json(base / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
    parts = [config, *([text] if text is not None else [])]
    for part in parts:
        if dequantised:
            part.pop("quantization_config", None)
        if dtype is not None:
            for key in ("dtype", "torch_dtype"):
                if part.get(key) is not None:
                    part[key] = dtype
        if untied and (part is config or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
        if rows is not None and (part is parts[-1] or "vocab_size" in part):
            part["vocab_size"] = rows
    if dtype is not None and "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = dtype
    return config


def write_config(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
