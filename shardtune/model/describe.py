"""What is the model that a config names made of? Its outline, from its files or from the Hub, and never its weights."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.model.locate import check_model_folder, looks_local
from shardtune.model.outline import NeedsTorch, Outline, read_outline
from shardtune.model.safetensors_headers import StoredTensor, read_headers, stored_tensor


def describe(section: ModelSection, *, may_build: bool = False) -> Outline:
    """The text model's parameters by name and shape.

    Args:
        may_build: Build the model on torch's meta device where its files alone do not tell.

    Raises:
        NeedsTorch: they do not, and it may not be built.
        UserInputError: there is no such model, or it is damaged or not supported.
    """
    return outline_of_files(section, *model_files(section), may_build=may_build)


def outline_of_files(
    section: ModelSection, folder: Path, stored: Mapping[str, StoredTensor], *, may_build: bool = True
) -> Outline:
    """The same, of what `model_files` found. Without torch nothing is built."""
    try:
        return read_outline(section, folder, stored)
    except NeedsTorch:
        if not may_build or find_spec("torch") is None:
            raise
    from shardtune.model.meta_model import build_meta_model  # brings torch

    return build_meta_model(section, folder, stored).outline


def model_files(section: ModelSection) -> tuple[Path, dict[str, StoredTensor]]:
    """A folder with the model's config.json, and the headers of its weights; none with `model.weights: random`.

    A hub name is looked up in the local cache first. What is not there is asked of the Hub: of each file of weights
    only its first bytes.
    """
    name, with_weights = section.model_name_or_path, section.weights == "checkpoint"
    check_model_folder(name, weights=with_weights)
    if looks_local(name):
        folder = Path(name).expanduser()
        return folder, read_headers(folder) if with_weights else {}
    cached = _cached(section)
    if cached is not None:
        try:
            check_model_folder(str(cached), weights=with_weights)
            return cached, read_headers(cached) if with_weights else {}
        except UserInputError:  # only a part of it was downloaded
            pass
    return _from_hub(section)


def _cached(section: ModelSection) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    revision = section.revision or "main"
    try:
        return Path(snapshot_download(section.model_name_or_path, revision=revision, local_files_only=True))
    except HFValidationError as error:
        raise _not_there(section, error) from error
    except OSError:  # nothing of it is there
        return None


def _from_hub(section: ModelSection) -> tuple[Path, dict[str, StoredTensor]]:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    name, revision = section.model_name_or_path, section.revision or "main"
    # Errors of the HTTP library it happens to use have a common base with its own.
    failures: tuple[type[Exception], ...] = (
        *HfHubHTTPError.__bases__, OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError
    )  # fmt: skip
    try:
        folder = Path(hf_hub_download(name, "config.json", revision=revision)).parent
        check_model_folder(str(folder), weights=False)
        if section.weights == "random":
            return folder, {}
        files = get_safetensors_metadata(name, revision=revision).files_metadata
        return folder, {
            tensor: stored_tensor(folder / file, tensor, vars(info), 0)
            for file, header in files.items()
            for tensor, info in header.tensors.items()
        }
    except failures as error:
        raise _not_there(section, error) from error


def _not_there(section: ModelSection, error: Exception) -> UserInputError:
    return UserInputError(
        f"'{section.model_name_or_path}' is neither a local folder nor available on the Hub.",
        why=(str(error).strip().splitlines() or [type(error).__name__])[0][:300],
        fix="Check model.model_name_or_path and model.revision; without a network, use a local folder.",
    )
