"""What is in a config file once the files it extends are merged under it?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardtune.config.problems import Place, Problem
from shardtune.config.settings_file import UnsuitableFileError, named_path, read_settings_file
from shardtune.config.suggestions import section_fields
from shardtune.config.yaml_reader import Node, merge, read_yaml

_SMALLEST = "a config needs at least `model: {model_name_or_path: …}` and `data: {dataset_name_or_path: …}`"
_SMALLEST_OF_SCRIPT = "set something in `cluster`, `parallel` or `train`, or give no config"
_FROM_SCRIPT = "docs/from-trl.md maps a script's settings to keys; `shardtune run -- {}` runs the script itself"
_OF_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "tpu_use_cluster"}
# Two files that each extend two files that … make thousands of reads out of a few lines.
_MOST_FILES = 100


def read_config(
    path: Path, environ: Mapping[str, str], *, of_script: bool = False
) -> tuple[Node | None, list[Problem]]:
    """Reads a file and, first, what its `extends` names (relative to it; later ones win, the file itself over all).

    Args:
        of_script: It is the config of a script's run, for what is said of a file that is none.

    Returns:
        The merged mapping without `extends`, and the problems. None where some file could not be read: checking the
        rest for missing keys would then report what the unreadable file may well contain.
    """
    return _Reading(environ, of_script).read(path, Place(str(path)), chain=())


class _Reading:
    """One config with all the files it extends.

    A file that is reached by `extends` may be anything of this machine that a config names, a private key too: nothing
    of its content is repeated in a message unless it is a config.
    """

    def __init__(self, environ: Mapping[str, str], of_script: bool) -> None:
        self.environ, self.of_script = environ, of_script
        self.smallest = _SMALLEST_OF_SCRIPT if of_script else _SMALLEST
        self.files = 0

    def read(
        self, path: Path, named_at: Place, chain: tuple[str, ...], written: str = ""
    ) -> tuple[Node | None, list[Problem]]:
        """Args:
        named_at: Where it is named; the file itself for the first.
        chain: The files that led here, the first one first.
        written: How the config names the file, where that is with a ${VAR}.
        """
        self.files += 1
        if self.files > _MOST_FILES:
            what = f"more than {_MOST_FILES} files are read through `extends`"
            return None, [Problem(named_at, "extends", what, "merge some of them")]
        text, problems = _text(path, named_at)
        if text is None:
            return None, problems
        if not chain and path.suffix == ".py":
            what = "this is a Python script; shardtune takes a config in YAML"
            return None, [Problem(named_at, "", what, _FROM_SCRIPT.format(path))]
        top, problems = read_yaml(text, str(path), self.environ, quote=not chain, written=written)
        if top is None:
            empty = Problem(Place(str(path), 1, 1), "", "the file is empty", self.smallest)
            return None, problems or [empty]
        if not top.is_mapping:
            kind = "a list" if isinstance(top.value, tuple) else "a single value"
            examples = "`cluster:`, `parallel:`" if self.of_script else "`model:`, `data:`"
            what = f"the file is {kind}, not sections ({examples}, …)"
            return None, [*(problems if not chain else []), Problem(top.place, "", what, self.smallest)]
        sections = top.value.keys() & {"extends", *section_fields()}
        if not chain and not sections and top.value.keys() & _OF_ACCELERATE:
            fix = f"pass it with `--accelerate-config {path}`, next to a config of your own"
            if self.of_script:
                fix = "of it, a script's run has `parallel.nproc` and `cluster.nodes`; what wraps the model is its own"
            return None, [Problem(named_at, "", "this is an accelerate config", fix)]
        if chain and top.value and not sections:
            what = f"'{path}' is not a config: it has none of the sections {', '.join(section_fields())}"
            return None, [Problem(named_at, "extends", what)]
        return self._with_bases(path, top, problems, chain)

    def _with_bases(
        self, path: Path, top: Node, problems: list[Problem], chain: tuple[str, ...]
    ) -> tuple[Node | None, list[Problem]]:
        extends = top.value.get("extends")
        own = replace(top, value={key: node for key, node in top.value.items() if key != "extends"})
        merged: Node | None = None
        readable = True
        for named in _named_files(extends, problems) if extends else []:
            base, more = self._base(path, named, chain)
            problems += more
            readable = readable and base is not None
            merged = base if merged is None or base is None else merge(merged, base)
        if not readable:
            return None, problems
        return (own if merged is None else merge(merged, own)), problems

    def _base(self, path: Path, named: Node, chain: tuple[str, ...]) -> tuple[Node | None, list[Problem]]:
        base = Path(os.path.normpath(path.parent / named_path(named.value)))
        chain = (*chain, os.path.realpath(path))
        if "\0" not in named.value and (same := os.path.realpath(base)) in chain:
            way = " → ".join(Path(file).name for file in (*chain[chain.index(same) :], same))
            return None, [Problem(named.place, "extends", f"these files extend each other in a circle: {way}")]
        return self.read(base, named.place, chain, _written_name(named))


def _written_name(named: Node) -> str:
    """A file's name as the config writes it, where some of it came from the environment."""
    folder = Path(named.place.written or named.place.source).parent
    text = named.reference.text if named.reference is not None else named.value
    if named.reference is None and not named.place.written:
        return ""
    return text if named_path(named.value).is_absolute() else str(folder / text)


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


def _text(path: Path, named_at: Place) -> tuple[str | None, list[Problem]]:
    """The file's text, or why it cannot be read; `named_at` is where it is named (the file itself for the first)."""
    key = "extends" if named_at.line else ""
    try:
        data = read_settings_file(path)
    except FileNotFoundError:
        return None, [Problem(named_at, key, f"there is no file '{path}'", _neighbours(path))]
    except UnsuitableFileError as error:
        return None, [Problem(named_at, key, f"'{path}' {error}", _neighbours(path / "x.yaml"))]
    except OSError as error:
        return None, [Problem(named_at, key, f"'{path}' cannot be read: {error.strerror or error}")]
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
    try:
        found = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml"))
    except FileNotFoundError:
        return f"the folder '{path.parent}' does not exist either"
    except (OSError, ValueError):
        return ""
    if not found:
        return ""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"'{path.parent}' has {', '.join(found[:5])}{more}"
