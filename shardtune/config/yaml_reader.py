"""What is in this YAML, and at which line and column?

YAML 1.2 scalars on PyYAML's parser: only true/false are booleans (so `eval_strategy: no` is the word), `1e-4` is a
number, dates stay text. Every key and value keeps its place, because an error without one sends people searching.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from yaml.composer import Composer, ComposerError
from yaml.error import Mark, MarkedYAMLError, YAMLError
from yaml.nodes import MappingNode, ScalarNode, SequenceNode
from yaml.nodes import Node as YamlNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from shardtune.config.expansion import ExpansionError, expand, variables
from shardtune.config.problems import Place, Problem
from shardtune.config.redact import is_secret
from shardtune.config.references import Reference

_INT = re.compile(r"[-+]?[0-9]{1,400}|0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INFINITE = {f"{sign}.{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "Inf", "INF")}
_NAN = {".nan", ".NaN", ".NAN"}
_PLAIN, _QUOTED = "plain", "quoted"
_TAGS = {
    f"tag:yaml.org,2002:{name}": kind
    for name, kind in {"int": int, "float": float, "bool": bool, "null": type(None)}.items()
}
# Aliases let ten lines stand for a billion values; no config of ours has more than a few hundred.
_MOST_NODES = 100_000


@dataclass(frozen=True)
class Node:
    """A value with its place: a scalar, a tuple of nodes (list) or a dict of nodes (mapping).

    `problem` is set when the value could not be understood (an unset ${VAR}); it counts only if no later file or
    override replaces the value. `reference` is set when the value came from the environment.
    """

    value: Any
    place: Place
    key_place: Place
    problem: Problem | None = None
    reference: Reference | None = None

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """The value as plain Python lists, dicts and scalars."""
        return self._mapped(lambda node: node.value)

    def written(self) -> Any:
        """The same with a `Reference` in place of each value that came from the environment."""
        return self._mapped(lambda node: node.reference or node.value)

    def quotable(self) -> Any:
        """The same for messages: the text in place of each value that came from a variable with a secret's name."""

        def leaf(node: Node) -> Any:
            text = node.reference.text if node.reference is not None else ""
            return text if any(map(is_secret, variables(text))) else node.value

        return self._mapped(leaf)

    def references(self) -> list[Reference]:
        """Those of this value and everything in it."""
        found = [self.reference] if self.reference else []
        return found + [reference for node in self._inside() for reference in node.references()]

    def problems(self) -> list[Problem]:
        """Problems of this value and everything in it."""
        found = [self.problem] if self.problem else []
        return found + [problem for node in self._inside() for problem in node.problems()]

    def _inside(self) -> Iterable[Node]:
        if isinstance(self.value, dict):
            return self.value.values()
        return self.value if isinstance(self.value, tuple) else ()

    def _mapped(self, leaf: Callable[[Node], Any]) -> Any:
        if isinstance(self.value, dict):
            return {key: node._mapped(leaf) for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node._mapped(leaf) for node in self.value]
        return leaf(self)


def merge(lower: Node, upper: Node) -> Node:
    """Both together: mappings are merged key by key, anything else in `upper` replaces what is in `lower`."""
    if not (lower.is_mapping and upper.is_mapping):
        return upper
    merged = dict(lower.value)
    for key, node in upper.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return replace(upper, value=merged)


def typed(text: str) -> Any:
    """What an unquoted scalar means: null, true/false, a number, else the text itself.

    Example:
        >>> [typed(word) for word in ("1e-4", "16", "no", "~")]
        [0.0001, 16, 'no', None]
    """
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    if text in _NAN:
        return math.nan
    return _INFINITE.get(text, text)


def read_yaml(
    text: str, source: str, environ: Mapping[str, str], *, quote: bool = True, written: str = ""
) -> tuple[Node | None, list[Problem]]:
    """Reads a whole file.

    Args:
        quote: Whether a syntax problem may repeat words of the text.
        written: How the config names the file, where that is with a ${VAR}.

    Returns:
        The top node (None where the text is not YAML, or empty) and the problems found: syntax, duplicate keys, tags.
    """

    def place(mark: Mark) -> Place:
        return Place(source, mark.line + 1, mark.column + 1, written=written)

    top, problems = _read(text, place, Place(source, 1, 1), "", environ)
    if top is None and not quote:  # what follows the colon is the parser's own report, with words of the text in it
        problems = [replace(problem, what=problem.what.partition(": ")[0]) for problem in problems]
    return top, problems


def read_value(text: str, place: Place, key: str, environ: Mapping[str, str]) -> tuple[Node | None, list[Problem]]:
    """Reads one value given on the command line, where everything stands at the same place."""
    return _read(text, lambda mark: place, place, key, environ)


def scalar(text: str, place: Place, key: str, environ: Mapping[str, str], *, quoted: bool = False) -> Node:
    """A scalar's node: expanded first, typed afterwards unless it was quoted."""
    try:
        expanded = expand(text, environ)
    except ExpansionError as error:
        return Node(text, place, place, Problem(place, key, error.what, error.fix))
    if "\0" in expanded:  # written as "\0"; no file name, column or text that is tokenised can hold it
        return Node(None, place, place, Problem(place, key, "the string contains a null character", "delete it"))
    value = expanded if quoted else typed(expanded)
    return Node(value, place, place, reference=Reference(text, quoted, type(value), value) if variables(text) else None)


def _read(
    text: str, place: Callable[[Mark], Place], start: Place, key: str, environ: Mapping[str, str]
) -> tuple[Node | None, list[Problem]]:
    try:
        top = _PositionedYaml(text).get_single_node()
    except YAMLError as error:
        return None, [_syntax_problem(error, text, place, start, key)]
    except RecursionError:
        return None, [Problem(start, key, "lists or mappings are nested too deeply")]
    if top is None:
        return None, []
    builder = _TreeBuilder(place, environ)
    return builder.build(top, key), builder.problems


class _PositionedYaml(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's parser, stopped at the nodes. It only notes whether a scalar was quoted; `typed` does the rest."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode:
            return _PLAIN if implicit[0] else _QUOTED
        return super().resolve(kind, value, implicit)


class _TreeBuilder:
    """Turns PyYAML's nodes into ours; collects what is wrong on the way instead of stopping at the first."""

    def __init__(self, place: Callable[[Mark], Place], environ: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._place = place
        self._environ = environ
        self._open: set[int] = set()
        self._count = 0

    def build(self, node: YamlNode, key: str) -> Node:
        place = self._place(node.start_mark)
        self._count += 1
        if id(node) in self._open:
            return self._refuse(place, key, "this alias contains itself")
        if self._count > _MOST_NODES:
            if self._count == _MOST_NODES + 1:
                self.problems.append(Problem(place, key, f"aliases expand to more than {_MOST_NODES} values"))
            return Node(None, place, place)
        self._open.add(id(node))
        built = self._build_kind(node, key, place)
        self._open.discard(id(node))
        return built

    def _build_kind(self, node: YamlNode, key: str, place: Place) -> Node:
        if isinstance(node, ScalarNode):
            return self._scalar(node, key, place)
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = tuple(self.build(item, f"{key}[{index}]") for index, item in enumerate(node.value))
            return Node(items, place, place)
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return Node(self._mapping(node, key), place, place)
        return self._refuse(place, key, f"the YAML tag {_tag_name(node)} is not supported", "write the plain value")

    def _scalar(self, node: ScalarNode, key: str, place: Place) -> Node:
        if node.tag == "tag:yaml.org,2002:str" or node.tag == _QUOTED:
            return scalar(node.value, place, key, self._environ, quoted=True)
        if node.tag == _PLAIN:
            return scalar(node.value, place, key, self._environ)
        if node.tag in _TAGS:  # how a config that is written down says that "${VAR}" is not text
            built = scalar(node.value, place, key, self._environ)
            if built.problem or type(built.value) is _TAGS[node.tag]:
                return built
            return self._refuse(place, key, f"the value does not have the type of its YAML tag {_tag_name(node)}")
        return self._refuse(place, key, f"the YAML tag {_tag_name(node)} is not supported", "write the plain value")

    def _mapping(self, node: MappingNode, path: str) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key_place = self._place(key_node.start_mark)
            if not isinstance(key_node, ScalarNode) or key_node.value == "":
                self.problems.append(Problem(key_place, path, "a key must be a string, not a list, a mapping or empty"))
                continue
            name = str(key_node.value)
            key = f"{path}.{name}" if path else name
            if name == "<<" and key_node.tag == _PLAIN:
                for entry, value in self._merged_keys(value_node, path).items():
                    merged.setdefault(entry, value)
                continue
            if name in own:
                first = own[name].key_place
                self.problems.append(Problem(key_place, key, f"this key is already set at {first}", "keep one"))
                continue
            own[name] = replace(self.build(value_node, key), key_place=key_place)
        return {**merged, **own}

    def _merged_keys(self, node: YamlNode, path: str) -> dict[str, Node]:
        built = self.build(node, path)
        merged: dict[str, Node] = {}
        for part in built.value if isinstance(built.value, tuple) else (built,):
            if part.is_mapping:
                merged = {**part.value, **merged}
            else:
                what = "`<<` merges a mapping, or a list of mappings"
                self.problems.append(Problem(part.place, path, what, "give it an alias such as *name"))
        return merged

    def _refuse(self, place: Place, key: str, what: str, fix: str = "") -> Node:
        return Node(None, place, place, Problem(place, key, what, fix))


def _tag_name(node: YamlNode) -> str:
    return str(node.tag).replace("tag:yaml.org,2002:", "!!")


def _syntax_problem(error: YAMLError, text: str, place: Callable[[Mark], Place], start: Place, key: str) -> Problem:
    """The parser's error in words for people who do not write parsers."""
    if isinstance(error, ReaderError):
        before = text[: error.position]
        spot = replace(start, line=before.count("\n") + 1, column=error.position - (before.rfind("\n") + 1) + 1)
        if start.kind != "file":
            spot = start
        return Problem(spot, key, f"a character that YAML does not allow (code {error.character})", "delete it")
    mark = error.problem_mark or error.context_mark if isinstance(error, MarkedYAMLError) else None
    if mark is None or not isinstance(error, MarkedYAMLError):
        return Problem(start, key, f"not valid YAML: {error}")
    tab = _tab_near(mark, text)
    if tab is not None:
        spot = replace(place(mark), column=tab + 1) if start.kind == "file" else start
        return Problem(spot, key, "a tab; YAML indents with spaces", "replace it with spaces")
    if isinstance(error, ComposerError) and "single document" in f"{error.context}":
        return Problem(place(mark), key, "a second document starts here (`---`)", "a config is one document")
    what = ", ".join(part for part in (error.problem, error.context) if part)
    return Problem(place(mark), key, f"not valid YAML: {what}", _syntax_hint(error, _line(text, mark)))


def _line(text: str, mark: Mark) -> str:
    lines = text.splitlines()
    return lines[mark.line] if mark.line < len(lines) else ""


def _tab_near(mark: Mark, text: str) -> int | None:
    """The column of the tab the parser stumbled over: at the mark itself, or in the indentation of its line."""
    line = _line(text, mark)
    if line[mark.column : mark.column + 1] == "\t":
        return int(mark.column)
    indent = line[: len(line) - len(line.lstrip())]
    return indent.index("\t") if "\t" in indent else None


def _syntax_hint(error: MarkedYAMLError, line: str) -> str:
    if re.search(r"(\[|(?<!\$)\{).*\$\{", line):
        return 'inside [ ] and { } put quotes around "${VAR}"'
    if "mapping values are not allowed" in (error.problem or ""):
        return "put quotes around a string that contains `: `, and check the indentation"
    if "cannot start any token" in (error.problem or ""):
        return "put quotes around a string that starts with this character"
    if "undefined alias" in (error.problem or ""):
        return "a string that starts with * needs quotes"
    if "flow" in (error.context or ""):
        return "close the bracket, and separate the items by commas"
    return "check the indentation and the brackets of this and the line before"
