"""What did the user write where a value came from the environment? Kept with the values, and saved in their place.

A run uses the value of `${S3_URL}`; its files and reports keep `${S3_URL}`. They can be run again, and do not reveal
the variable's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig


_NOT_BY_CHANCE = 6


@dataclass(frozen=True)
class Reference:
    """A text with ${VAR} in it.

    Attributes:
        text: As the user wrote it.
        quoted: It stood in quotes, and is text whatever the variable holds.
        kind: What YAML took it for: str, int, float, bool or None's type.
        value: What it stands for in the checked config. Not written down.
    """

    text: str
    quoted: bool
    kind: type
    value: Any = field(repr=False)


def keep_references(config: RunConfig, written: dict[str, dict[str, Any]]) -> None:
    """Let the config remember what was written.

    Args:
        written: By section and key, the values that hold references, with `Reference`s in their places.
    """
    values = config.model_dump()
    config._references = {
        section: {key: _with_values(tree, values[section][key]) for key, tree in fields.items()}
        for section, fields in written.items()
    }


def written_settings(config: RunConfig, mode: Literal["json", "python"] = "python") -> dict[str, dict[str, Any]]:
    """The settings by section and name, with a `Reference` wherever a value is still what a reference stood for."""
    return {
        section: {key: _restored(value, config._references.get(section, {}).get(key)) for key, value in fields.items()}
        for section, fields in config.model_dump(mode=mode).items()
    }


def as_text(value: Any) -> Any:
    """A value with the texts of its references, as JSON can hold it."""
    return replaced(value, lambda reference: reference.text)


def replaced(value: Any, by: Callable[[Reference], Any]) -> Any:
    """A value with something else in the place of each of its references."""
    if isinstance(value, Reference):
        return by(value)
    if isinstance(value, dict):
        return {key: replaced(item, by) for key, item in value.items()}
    return [replaced(item, by) for item in value] if isinstance(value, list) else value


def put_back(config: RunConfig, reported: Any) -> Any:
    """What a run reports, with references again in place of the texts they stand for.

    Example:
        >>> put_back(config, {"folder": "/mnt/ana/prepared"})  # data.cache_dir: ${CACHE}
        {'folder': '${CACHE}/prepared'}
    """
    if isinstance(reported, dict):
        return {key: put_back(config, item) for key, item in reported.items()}
    if isinstance(reported, list | tuple):
        return [put_back(config, item) for item in reported]
    if not isinstance(reported, str):
        return reported
    for reference in _all_references(config._references):
        # Shorter ones are words that mean something else elsewhere.
        if isinstance(reference.value, str) and len(reference.value) >= _NOT_BY_CHANCE:
            reported = reported.replace(reference.value, reference.text)
    return reported


def _all_references(written: Any) -> list[Reference]:
    if isinstance(written, Reference):
        return [written]
    inside = written.values() if isinstance(written, dict) else written if isinstance(written, list) else ()
    return [reference for item in inside for reference in _all_references(item)]


def _with_values(written: Any, value: Any) -> Any:
    """References stand for what the check has made of them: `q_proj,v_proj` is a list by then."""
    if isinstance(written, Reference):
        return replace(written, value=value)
    if isinstance(written, dict) and isinstance(value, dict):
        return {key: _with_values(item, value.get(key)) for key, item in written.items()}
    if isinstance(written, list) and isinstance(value, list) and len(written) == len(value):
        return [_with_values(*pair) for pair in zip(written, value, strict=True)]
    return written


def _restored(value: Any, written: Any) -> Any:
    if isinstance(written, Reference):
        return written if written.value == value else value
    if isinstance(written, dict) and isinstance(value, dict):
        return {key: _restored(item, written.get(key)) for key, item in value.items()}
    if isinstance(written, list) and isinstance(value, list) and len(written) == len(value):
        return [_restored(*pair) for pair in zip(value, written, strict=True)]
    return value
