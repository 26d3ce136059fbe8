"""What does a config file say once the files it extends are merged under it?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardtune.config.problems import Place, Problem
from shardtune.config.yaml_reader import Node, merge, read_yaml

_SMALLEST = "a config needs at least `model: {model_name_or_path: …}` and `data: {dataset_name_or_path: …}`"


def read_config(path: Path, environ: Mapping[str, str]) -> tuple[Node | None, list[Problem]]:
    """Reads a file and, first, what its `extends` names (relative to it; later ones win, the file itself over all).

    Returns:
        The merged mapping without `extends`, and the problems. None where some file could not be read: checking the
        rest for missing keys would then report what the unreadable file may well contain.
    """
    return _read(path, environ, Place(str(path)), open_files=())


def _read(
    path: Path, environ: Mapping[str, str], asked_at: Place, open_files: tuple[Path, ...]
) -> tuple[Node | None, list[Problem]]:
    text, problems = _text(path, asked_at)
    if text is None:
        return None, problems
    top, problems = read_yaml(text, str(path), environ)
    if top is None:
        empty = Problem(Place(str(path), 1, 1), "", "the file is empty", _SMALLEST)
        return None, problems or [empty]
    if not top.is_mapping:
        kind = "a list" if isinstance(top.value, tuple) else "a single value"
        what = f"the file holds {kind}, not sections (`model:`, `data:`, …)"
        return None, [*problems, Problem(top.place, "", what, _SMALLEST)]
    extends = top.value.get("extends")
    own = replace(top, value={key: node for key, node in top.value.items() if key != "extends"})
    merged: Node | None = None
    readable = True
    for named in _named_files(extends, problems) if extends else []:
        base, more = _read_base(path, named, environ, open_files)
        problems += more
        readable = readable and base is not None
        merged = base if merged is None or base is None else merge(merged, base)
    if not readable:
        return None, problems
    return (own if merged is None else merge(merged, own)), problems


def _named_files(extends: Node, problems: list[Problem]) -> list[Node]:
    """The entries of `extends`; what is not a file name is added to `problems`."""
    entries = list(extends.value) if isinstance(extends.value, tuple) else [extends]
    found = []
    for entry in entries:
        if entry.problem:
            problems.append(entry.problem)
        elif isinstance(entry.value, str) and entry.value:
            found.append(entry)
        else:
            problems.append(Problem(entry.place, "extends", "expected a file name, or a list of file names"))
    return found


def _read_base(
    path: Path, named: Node, environ: Mapping[str, str], open_files: tuple[Path, ...]
) -> tuple[Node | None, list[Problem]]:
    base = Path(os.path.normpath(path.parent / Path(named.value).expanduser()))
    chain = (*open_files, path.resolve())
    if base.resolve() in chain:
        way = " → ".join(file.name for file in (*chain[chain.index(base.resolve()) :], base))
        return None, [Problem(named.place, "extends", f"these files extend each other in a circle: {way}")]
    return _read(base, environ, named.place, chain)


def _text(path: Path, asked_at: Place) -> tuple[str | None, list[Problem]]:
    """The file's text, or why it cannot be had; `asked_at` is where its name stands (the file itself for the first)."""
    key = "extends" if asked_at.line else ""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, [Problem(asked_at, key, f"there is no file '{path}'", _neighbours(path))]
    except IsADirectoryError:
        return None, [Problem(asked_at, key, f"'{path}' is a folder, not a file", _neighbours(path / "x.yaml"))]
    except OSError as error:
        return None, [Problem(asked_at, key, f"'{path}' cannot be read: {error.strerror or error}")]
    try:
        return data.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        place = Place(str(path), before.count(b"\n") + 1, column)
        what = f"not UTF-8 text (byte 0x{data[error.start]:02x})"
        return None, [Problem(place, "", what, "save the file as UTF-8")]


def _neighbours(path: Path) -> str:
    """Which files could have been meant?"""
    if not path.parent.is_dir():
        return f"the folder '{path.parent}' does not exist either"
    found = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml"))
    if not found:
        return ""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"'{path.parent}' holds {', '.join(found[:5])}{more}"
