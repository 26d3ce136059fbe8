"""Which values does a setting accept? One wording for error messages and the reference page."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from shardtune.config.fields import Section

_WORDS: dict[Any, str] = {bool: "true or false", str: "a string", Any: "anything", type(None): "null"}


def expected(field: FieldInfo) -> str:
    """Describes a field's type and limits.

    Example:
        >>> expected(LoraSection.model_fields["r"])
        'a whole number, at least 1'
    """
    return _describe(field.annotation, field.metadata)


def literal_words(annotation: Any) -> list[str]:
    """The literal values of a setting (`auto`, `cosine`, …), to find the one that was meant."""
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for part in get_args(annotation) if not isinstance(part, str) for word in literal_words(part)]


def accepts(annotation: Any, kind: type) -> bool:
    """Does a setting accept values of this type (`dict`, `list`, …)?"""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(accepts(part, kind) for part in get_args(annotation))
    return annotation is kind or get_origin(annotation) is kind


def item_section(annotation: Any) -> type[Section] | None:
    """The section that items of a list are (`list[VolumeSection]`), if any is."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := item_section(part)) is not None), None)


def entry_words(mapping: Any) -> str:
    """What an entry of a mapping accepts."""
    return _describe(get_args(mapping)[1], ())


def _describe(annotation: Any, limits: Iterable[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _describe(inner, [*limits, *_flat(more)])
    if origin in (Union, types.UnionType):
        parts = [_describe(part, limits) for part in get_args(annotation)]
        return ", or ".join(parts)
    if origin is Literal:
        words = [_literal(word) for word in get_args(annotation)]
        return words[0] if len(words) == 1 else "one of: " + ", ".join(words)
    if origin is list:
        return "a list of strings" if get_args(annotation) == (str,) else "a list"
    if origin is dict:
        entry = get_args(annotation)[1]
        entry = get_args(entry)[0] if get_origin(entry) is Annotated else entry
        if entry is Any:
            return "a mapping"
        return f"a mapping of names to {'strings' if entry is str else 'numbers'}"
    if annotation in (int, float):
        name = "a whole number" if annotation is int else "a number"
        range_words = _range(limits)
        return f"{name}, {range_words}" if range_words else name
    return _WORDS.get(annotation, "a string") + (" (not empty)" if _is_not_empty(annotation, limits) else "")


def _flat(metadata: Iterable[Any]) -> list[Any]:
    """Limits inside a nested `Field(ge=1)` count too."""
    return [limit for item in metadata for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _literal(word: Any) -> str:
    return str(word).lower() if isinstance(word, bool) else str(word)


def _is_not_empty(annotation: Any, limits: Iterable[Any]) -> bool:
    return annotation is str and any(isinstance(limit, MinLen) for limit in limits)


def _range(limits: Iterable[Any]) -> str:
    low = high = ""
    for limit in limits:
        match limit:
            case Ge():
                low = f"at least {limit.ge}"
            case Gt():
                low = f"above {limit.gt}"
            case Le():
                high = f"at most {limit.le}"
            case Lt():
                high = f"below {limit.lt}"
    return " and ".join(part for part in (low, high) if part)
