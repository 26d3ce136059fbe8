"""Is there a model where the config says? Answered without torch, before any process is started."""

from __future__ import annotations

import json
from pathlib import Path

from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.model.unsuitable import refuse_unsuitable

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER_PATTERNS = ("tokenizer.json", "tokenizer_config.json", "tekken.json", "*.model", "vocab.*")
_KEY = "model.model_name_or_path"


def looks_local(name: str) -> bool:
    """A path, as opposed to a hub name such as `org/model`: written like one, or it or the folder above exists."""
    return _is_written_as_path(name) or Path(name).exists() or bool(_folder_here(name))


def _is_written_as_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~", ".\\")) or name.count("/") > 1


def same_name(one: str, other: str) -> bool:
    """Whether two names are of one model: the same name on the Hub, or the same folder however it is written."""
    if one == other or not (looks_local(one) and looks_local(other)):
        return one == other
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _folder_here(name: str) -> str:
    """`models` of `models/mine`, where there is such a folder: nobody means the hub's organisation of that name."""
    parent = Path(name).parent
    return str(parent) if parent != Path() and parent.is_dir() else ""


def local_or_hub(name: str) -> str:
    """What transformers is to be asked for: `~` means nothing to it."""
    return str(Path(name).expanduser()) if looks_local(name) else name


def folder_on_disk(section: ModelSection) -> Path:
    """The folder of the model's files on this machine: as named, or a hub's in the cache. Nothing is downloaded.

    Raises:
        UserInputError: it is not here.
    """
    name = section.model_name_or_path
    if looks_local(name):
        return Path(name).expanduser()
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=section.revision or "main")
    if not isinstance(found, str):
        raise UserInputError(
            f"The model '{name}' is not on this machine.",
            why="It is a Hub name, and its files are not in the Hub's cache.",
            fix=f"Download it (hf download {name}), or set {_KEY} to a local folder.",
        )
    return Path(found).parent


def check_model_folder(name: str, key: str = _KEY, *, weights: bool = True) -> None:
    """Raise if `name` is a local path that cannot be a model. A hub name passes: only loading can tell.

    Args:
        weights: Whether a config.json alone is too little.

    Raises:
        UserInputError: the path does not exist, is a file, lacks config.json or safetensors weights, or holds a kind of
            model that is not supported.
    """
    if not looks_local(name):
        return
    folder = Path(name).expanduser()
    if not folder.exists():
        raise UserInputError(
            f"The model folder '{name}' does not exist.",
            why=f"The folder '{parent}' is here, so it looks like a local path, and the Hub was not asked."
            if (parent := _folder_here(name)) and not _is_written_as_path(name)
            else "It looks like a local path, so the Hub was not asked.",
            fix=f"Set {key} to a folder with config.json and *.safetensors, or to a Hub name such as org/model.",
        )
    if not folder.is_dir():
        raise UserInputError(
            f"'{name}' is a file, not a model folder.", fix=f"Set {key} to the folder that contains config.json."
        )
    config = folder / "config.json"
    if not config.is_file():
        contents = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise UserInputError(
            f"'{name}' is not a model: it has no config.json.",
            why=f"It contains: {contents}.",
            fix=f"Set {key} to a folder written by save_pretrained or downloaded from the Hub.",
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserInputError(
            f"'{config}' is not valid JSON.", why=str(error), fix="Copy or download the model again."
        ) from error
    if not isinstance(content, dict):
        raise UserInputError(
            f"'{config}' does not describe a model: it is not a JSON object.", fix="Copy or download the model again."
        )
    refuse_unsuitable(name, content)
    if weights and not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        other = ", ".join(sorted(p.name for p in folder.glob("*.bin"))[:3])
        raise UserInputError(
            f"'{name}' has a config.json but no safetensors weights.",
            why=f"It has {other}, a pickle format that is not supported." if other else "",
            fix=f"Save the model with save_pretrained (which writes safetensors), or correct {key}.",
        )


def check_tokenizer_folder(section: ModelSection) -> None:
    """Raise if the tokenizer's folder, or the model's where none is named, is local and has none.

    Raises:
        UserInputError: it does not exist, or holds no file of a tokenizer.
    """
    own = section.tokenizer_name_or_path
    name = own or section.model_name_or_path
    folder = Path(name).expanduser()
    if not looks_local(name) or (own is None and not folder.is_dir()):  # `check_model_folder` says that
        return
    if not folder.is_dir():
        raise UserInputError(
            f"The tokenizer folder '{name}' does not exist.",
            fix="Set it to a folder with tokenizer.json, or to a Hub name.",
        )
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_PATTERNS):
        raise UserInputError(
            f"'{name}' contains no tokenizer.", fix="Set model.tokenizer_name_or_path to a folder with tokenizer.json."
        )
