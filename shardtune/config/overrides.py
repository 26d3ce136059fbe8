"""What do the overrides on the command line (`-o train.seed=1`) set? A tree like a file's, typed the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardtune.config.expected import accepts
from shardtune.config.problems import Place, Problem
from shardtune.config.suggestions import section_fields
from shardtune.config.yaml_reader import Node, merge, read_value, scalar

_COLLECTIONS = ("[", "{")
_QUOTES = ('"', "'")


def read_overrides(overrides: Sequence[str], environ: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    """Reads all overrides into one tree; a later one wins over an earlier one.

    Example:
        >>> tree, _ = read_overrides(["lora.r=32", "lora.target_modules=[q_proj, v_proj]"], {})
        >>> tree.plain()
        {'lora': {'r': 32, 'target_modules': ['q_proj', 'v_proj']}}
    """
    nowhere = Place("-o", kind="override")
    tree = Node({}, nowhere, nowhere)
    problems: list[Problem] = []
    for text in overrides:
        place = Place(f"-o {text}", kind="override")
        key, equals, value = text.partition("=")
        names = [name.strip() for name in key.split(".")]
        path = ".".join(names)
        if not equals:
            problems.append(Problem(place, path, "it has no `=`", "write it as section.key=value, e.g. train.seed=1"))
            continue
        if not all(names):
            problems.append(Problem(place, path, "no key before the `=`", "write it as section.key=value"))
            continue
        node, more = _value(value.strip(), place, path, environ)
        problems += more
        if node is not None and len(names) == 1 and path in section_fields() and not node.is_mapping:
            # Reported here: merged, a later override of the same section would hide it.
            fix = f"name a key in it, as in {path}.{next(iter(section_fields()[path].model_fields))}=…"
            problems.append(Problem(place, path, f"`{path}` is a section, not a single value", fix))
        elif node is not None:
            tree = merge(tree, _nested(names, node))
    return tree, problems


def _nested(names: list[str], node: Node) -> Node:
    for name in reversed(names):
        node = Node({name: node}, node.place, node.place)
    return node


def _value(text: str, place: Place, path: str, environ: Mapping[str, str]) -> tuple[Node | None, list[Problem]]:
    quoted = len(text) > 1 and text[0] in _QUOTES and text[-1] == text[0]
    if quoted or (text.startswith(_COLLECTIONS) and not _holds_text(path)):
        node, problems = read_value(text, place, path, environ)
        return node, [Problem(place, path, problem.what, problem.fix) for problem in problems]
    # Not handed to the YAML parser: `: ` and ` #` in a value mean themselves here.
    return scalar(text, place, path, environ), []


def _holds_text(path: str) -> bool:
    """Does this setting hold a string only? `data.prompt_template={question} {answer}` is then not a mapping."""
    section, _, key = path.partition(".")
    model = section_fields().get(section)
    field = model.model_fields.get(key) if model else None
    return field is not None and accepts(field.annotation, str) and not accepts(field.annotation, list)
