"""In which fields does the pod template of one role differ from another's?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardtune.cluster.import_report import shown

# Where a role without the whole field is compared entry by entry: its GPUs and volumes are to be named one by one.
_ENTRIES = ("metadata", "labels", "annotations", "spec", "containers", "resources", "limits", "requests", "env",
            "volumes", "volumeMounts", "nodeSelector")  # fmt: skip
# Values of other fields are not shown: variables, commands and annotations may hold secrets.
_SHOWN = re.compile(r"(?:^|\.)(?:resources\..+|image|volumes\.[^.]+|volumeMounts\..+)$")


@dataclass(frozen=True)
class Difference:
    """A field that differs; None where a template does not have it."""

    path: str
    first: Any
    other: Any

    @property
    def shown_first(self) -> str:
        return self._shown(self.first)

    @property
    def shown_other(self) -> str:
        return self._shown(self.other)

    def _shown(self, value: Any) -> str:
        if not _SHOWN.search(self.path):
            return ""
        if isinstance(value, dict) and "name" in value:  # the path has the name
            value = (
                {name: part for name, part in value.items() if name != "name"} if "mountPath" not in value else value
            )
        return shown(value)


def template_differences(first: Any, other: Any) -> list[Difference]:
    """Every field that differs, in the order of the first template."""
    return list(_differences(first, other, ""))


def _differences(first: Any, other: Any, path: str) -> Iterator[Difference]:
    if first == other:
        return
    if path.rpartition(".")[2] in _ENTRIES:
        empty: Any = [] if isinstance(first, list) or isinstance(other, list) else {}
        first, other = (empty if first is None else first), (empty if other is None else other)
    pairs = _entries(first, other, path)
    if pairs is None:
        yield Difference(path, first, other)
        return
    for name, one, two in pairs:
        yield from _differences(one, two, f"{path}.{name}".strip("."))


def _entries(first: Any, other: Any, path: str) -> list[tuple[str, Any, Any]] | None:
    """The entries of two mappings or lists, side by side; None where they can only be compared as a whole."""
    if isinstance(first, dict) and isinstance(other, dict):
        return [(str(name), first.get(name), other.get(name)) for name in dict.fromkeys([*first, *other])]
    if not (isinstance(first, list) and isinstance(other, list)):
        return None
    if path.endswith("containers") and len(first) == len(other) == 1:  # one container each, whatever it is called
        return [("", first[0], other[0])]
    ours, theirs = _by_name(first), _by_name(other)
    if ours is None or theirs is None:
        return None
    return [(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])]


def _by_name(items: list[Any]) -> dict[str, Any] | None:
    """A list of named things by name, mounts by their path; None if it is no such list."""
    if not all(isinstance(item, dict) and "name" in item for item in items):
        return None
    named = {str(item.get("mountPath") or item["name"]): item for item in items}
    return named if len(named) == len(items) else None
