"""Do all local paths in a config exist, and are the output folders writable? Without torch, in milliseconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from shardtune.config import ConfigError, Place, Problem, ResolvedConfig
from shardtune.config.schema import RunConfig
from shardtune.data.chat import BUILT_IN
from shardtune.data.readers import DataFile
from shardtune.data.source import check_dataset_path, sources_of
from shardtune.errors import UserInputError
from shardtune.model.locate import check_model_folder, check_tokenizer_folder, looks_local

_RESUME_WORDS = ("auto", "latest", "best", "never")


def check_named_paths(resolved: ResolvedConfig, file: Path) -> None:
    """Look at every local path of the config.

    Raises:
        ConfigError: with all that are wrong, each at the line that names it.
    """
    problems = []
    for key, error in _errors(resolved.config):
        origin = resolved.origins[key]
        place = Place(origin.where or str(file), kind="override" if origin.source == "override" else "file")
        text = " ".join(part for part in (error.what, error.why) if part)
        problems.append(Problem(place, key, text, error.fix))
    if problems:
        raise ConfigError(problems, str(file))


def not_checked(config: RunConfig) -> list[str]:
    """What only starting the run can show."""
    model = config.model
    names = [
        name for name in (model.model_name_or_path, model.tokenizer_name_or_path) if name and not looks_local(name)
    ]
    names += [source.path for source in sources_of(config.data) if "://" in source.path or _is_hub_dataset(source.path)]
    elsewhere = [f"whether {', '.join(dict.fromkeys(names))} can be downloaded"] if names else []
    return [
        *elsewhere,
        "the rows, columns and splits of the data (`shardtune data inspect`)",
        "lora.target_modules in the model",
        *(["whether train.callbacks can be imported"] if config.train.callbacks else []),
        *(["whether the trackers of train.report_to are installed"] if config.train.report_to != "none" else []),
        "whether it fits in memory",
    ]


def _is_hub_dataset(name: str) -> bool:
    return not looks_local(name) and DataFile.of(name) is None and not any(sign in name for sign in "*?[")


def check_inputs(config: RunConfig, *, model: bool = True) -> None:
    """Raise if the model or the data is not where the config says.

    Args:
        model: Whether this machine needs the model's folder.
    """
    checks = [_checks(config)["data.dataset_name_or_path"]]
    if model:
        checks.insert(0, _checks(config)["model.model_name_or_path"])
    for check in checks:
        if error := _error(check):
            raise error


def _errors(config: RunConfig) -> Iterator[tuple[str, UserInputError]]:
    for key, check in _checks(config).items():
        if error := _error(check):
            yield key, error


def _error(check: Callable[[], None]) -> UserInputError | None:
    try:
        check()
    except UserInputError as error:
        return error
    except OSError as error:  # a name that is too long, a folder that may not be entered
        return UserInputError(f"It cannot be read: {error.strerror} ({error.filename}).")
    return None


def _checks(config: RunConfig) -> dict[str, Callable[[], None]]:
    model, data, train = config.model, config.data, config.train
    return {
        "model.model_name_or_path": lambda: check_model_folder(
            model.model_name_or_path, weights=model.weights == "checkpoint"
        ),
        "model.tokenizer_name_or_path": lambda: check_tokenizer_folder(model),
        "data.dataset_name_or_path": lambda: check_dataset_path(data),
        "data.chat_template": lambda: _check_template(data.chat_template),
        "data.cache_dir": lambda: check_writable("data.cache_dir", data.cache_dir),
        "train.output_dir": lambda: check_writable("train.output_dir", train.output_dir),
        "train.fallback_dir": lambda: check_writable("train.fallback_dir", train.fallback_dir),
        "train.resume": lambda: _check_resume(train.resume),
    }


def _check_template(template: str | None) -> None:
    if template is not None and template not in BUILT_IN and not Path(template).expanduser().is_file():
        raise UserInputError(
            f"The chat template '{template}' does not exist.",
            fix=f"Name a .jinja file, or one of {', '.join(BUILT_IN)}.",
        )


def check_writable(key: str, name: str | None) -> None:
    """Raise unless the folder, or the nearest one above it that exists, may be written to."""
    if name is None:
        return
    folder = Path(name).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UserInputError(f"'{there}' is a file, not a folder.", fix=f"Set {key} to a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserInputError(
            f"'{there}' is not writable (as user {os.geteuid()}).",
            fix=f"Set {key} to a folder you can write to.",
        )


def _check_resume(wanted: str) -> None:
    if wanted not in _RESUME_WORDS and not Path(wanted).expanduser().exists():
        raise UserInputError(
            f"The checkpoint '{wanted}' does not exist.",
            fix=f"Give {', '.join(_RESUME_WORDS)}, or the path of a checkpoint or a run.",
        )
