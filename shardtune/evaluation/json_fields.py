"""How much of a JSON answer is right? Whether it is valid, and which of its fields are those expected. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Field = tuple[tuple[str | int, ...], str]  # where it is (keys, and indices of lists), and its value as JSON
_DEEPEST = 200


@dataclass(frozen=True)
class FieldCounts:
    """Of one answer: fields that are expected, that were answered, and that are in both."""

    expected: int
    answered: int
    right: int


def parsed(text: str) -> dict[str, Any] | list[Any] | None:
    """The object or list that the whole text is; None where it is not valid JSON, or a bare value.

    Example:
        >>> parsed(' {"a": 1}')
        {'a': 1}
        >>> parsed('Sure! {"a": 1}') is None and parsed("12") is None and parsed("[NaN]") is None
        True
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict | list) or _is_deeper(value, _DEEPEST):
        return None
    return value


def fields(value: object) -> list[Field]:
    """A value flattened to its leaves. An empty object or list is a leaf; a list's elements are told by their place.

    Example:
        >>> fields({"a": {"b": [1, "x"]}, "c": []})
        [(('a', 'b', 0), '1'), (('a', 'b', 1), '"x"'), (('c',), '[]')]
    """
    return list(_leaves(value, ()))


def compared(expected: object, answer: object | None) -> FieldCounts:
    """The fields of an answer against those expected; a field is right where both path and value are.

    Args:
        answer: None where it is not valid: it has no fields.
    """
    wanted = set(fields(expected))
    given = set(fields(answer)) if answer is not None else set()
    return FieldCounts(len(wanted), len(given), len(wanted & given))


def _leaves(value: object, path: tuple[str | int, ...]) -> Iterator[Field]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, _written(value)


def _written(value: object) -> str:
    """As JSON; 1 and 1.0 are the same number, true is no number, and -0 is 0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def _is_deeper(value: object, left: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left < 0 or any(_is_deeper(item, left - 1) for item in inside)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
