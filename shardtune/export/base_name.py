"""What is the base model called elsewhere, and under which licence? A path of this machine means nothing to others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.model.locate import looks_local

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")  # a folder of the Hub's cache
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LICENCE_FIELDS = ("license", "license_name", "license_link")


def check_base_name(given: str) -> None:
    """Raises:
    UserInputError: the Hub has no such names.
    """
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not in __all__

    try:
        validate_repo_id(given)
    except ValueError as error:
        raise UserInputError(
            f"--base-name '{given}' is not a name on the Hub.",
            why=str(error),
            fix="Write it like OWNER/NAME: letters, digits, '-', '_' and '.', with one slash.",
        ) from error


def hub_name(section: ModelSection, folder: Path, given: str | None = None) -> str | None:
    """As the Hub knows the base; None where only a local folder is known.

    Args:
        folder: Of its files.
        given: By the user.
    """
    if given is not None:
        return given
    if not looks_local(section.model_name_or_path):
        return section.model_name_or_path
    cached = [match for part in folder.absolute().parts if (match := _CACHED.fullmatch(part))]
    if cached:
        return f"{cached[-1]['owner']}/{cached[-1]['name']}"
    try:
        written = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    usable = isinstance(written, str) and _HUB_NAME.fullmatch(written) is not None and not looks_local(written)
    return written if usable else None


def licence(folder: Path) -> dict[str, str]:
    """The licence fields of the base's own model card."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        found = _FRONT_MATTER.match(text)
        front: Any = yaml.safe_load(found[1]) if found else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(front, dict):
        return {}
    return {field: front[field] for field in _LICENCE_FIELDS if isinstance(front.get(field), str)}
