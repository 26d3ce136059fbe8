"""Does a config fit the schema? Every key and value is checked, and all problems are reported together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardtune.config.expected import accepts, entry_words, expected, item_section, literal_words
from shardtune.config.fields import LARGEST, Section
from shardtune.config.problems import Problem, shown
from shardtune.config.redact import HIDDEN, is_secret
from shardtune.config.renamed import RENAMED
from shardtune.config.schedules import REFUSED_SCHEDULES
from shardtune.config.schema import RunConfig
from shardtune.config.suggestions import (
    FOREIGN_VALUES,
    moved_settings,
    nearest,
    section_fields,
    unknown_key,
)
from shardtune.config.yaml_reader import Node

# Values that are understood and refused: the type alone would not say why.
_REFUSED_VALUES: dict[tuple[str, Any], tuple[str, str]] = {
    **{
        ("train.lr_scheduler_type", name): (f"{name} is not supported: {why}", fix)
        for name, (why, fix) in REFUSED_SCHEDULES.items()
    },
    ("model.torch_dtype", "float16"): (
        "float16 is not supported: it needs loss scaling and overflows where bfloat16 does not",
        "use bfloat16, or float32",
    ),
    **{
        ("lora.init_lora_weights", name): (
            f"{name} decomposes whole weights or activations before the first step, and no rank holds a whole weight",
            "use true, with use_rslora: true and a higher r",
        )
        for name in ("pissa", "olora", "eva", "corda", "lora_ga")
    },
    ("lora.init_lora_weights", "loftq"): (
        "LoftQ starts adapters for 4-bit weights, which are not supported",
        "use true, and model.base_precision: fp8 for smaller weights",
    ),
    ("lora.init_lora_weights", False): (
        "with random A and B training would not start from the checkpoint (PEFT has it for tests)",
        "use true or gaussian",
    ),
    # Tried with bitsandbytes 0.50 (its outputs under FSDP2 are right) and torchao 0.18 (which has dropped NF4).
    ("model.base_precision", "nf4"): (
        "4-bit weights are not supported: bitsandbytes quantises whole weights before they are sharded, keeps all "
        "scales on every rank, and has no fused experts",
        "use fp8",
    ),
}


@dataclass
class Checked:
    """A config for further checks, and the problems found so far.

    `config` holds what was valid; an invalid value is at its default and a missing required one at a placeholder.
    `wrong` are the dotted paths of both, so that later checks leave them out.
    """

    config: RunConfig
    leaves: dict[str, Node]
    problems: list[Problem] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)


def check_fields(tree: Node) -> Checked:
    """Checks a merged config tree against the schema."""
    walk = _Walk()
    walk.top(tree)
    values = walk.values
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        walk.add_validation_errors(error.errors(include_url=False), tree)
        config = RunConfig.model_validate(values)
    return Checked(config, walk.leaves, walk.problems, walk.wrong)


class _Walk:
    """Goes through the tree once, keeps what the schema has and reports the rest."""

    def __init__(self) -> None:
        # Every section is there from the start, so that a missing `model:` is reported as its missing key.
        self.values: dict[str, dict[str, Any]] = {name: {} for name in section_fields()}
        self.leaves: dict[str, Node] = {}
        self.problems: list[Problem] = []
        self.wrong: set[str] = set()

    def top(self, tree: Node) -> None:
        for key, node in tree.value.items():
            section = section_fields().get(key)
            if key == "extends":
                fix = "`extends` works in files, not in overrides"
                self.problems.append(Problem(node.key_place, key, "unknown key", fix))
            elif section is None:
                self.problems.append(Problem(node.key_place, key, *unknown_key(key, node.plain())))
            elif node.problem:
                self.problems.append(node.problem)
                self.wrong.update(f"{key}.{name}" for name in section.model_fields)
            elif node.is_mapping:
                self._section(key, section, node)
            elif node.value is not None:  # `lora:` with everything under it commented out sets nothing
                what = f"expected a section (indented `key: value` lines); got {shown(node.quotable())}"
                self.problems.append(Problem(node.place, key, what))
                self.wrong.update(f"{key}.{name}" for name in section.model_fields)

    def _section(self, name: str, section: type[Section], node: Node) -> None:
        for key, value in node.value.items():
            path = f"{name}.{key}"
            info = section.model_fields.get(key)
            if path == "train.extra":
                self.problems.append(Problem(value.key_place, path, moved_settings(value.plain())))
                continue
            if path in RENAMED:
                self.problems.append(Problem(value.key_place, path, f"`{path}` is gone: {RENAMED[path]}"))
                continue
            if info is None:
                self.problems.append(Problem(value.key_place, path, *unknown_key(key, value.plain(), name)))
                continue
            broken = value.problems()
            if broken:
                self.problems += broken
                self.wrong.add(path)
                continue
            holds_mapping = accepts(info.annotation, dict)
            if value.is_mapping and not holds_mapping:
                self._not_a_mapping(path, value, expected(info))
                continue
            if holds_mapping and value.value is None:
                value = replace(value, value={})
            self.leaves[path] = value
            self.values[name][key] = value.plain()

    def _not_a_mapping(self, path: str, node: Node, words: str) -> None:
        self.wrong.add(path)
        inner, first = next(iter(node.value.items()), ("", node))
        what = f"expected {words}; got a mapping (`{inner}: …`)" if inner else f"expected {words}; got {{}}"
        self.problems.append(Problem(first.key_place, path, what))

    def add_validation_errors(self, errors: Iterable[ErrorDetails], tree: Node) -> None:
        """One problem per setting, however many branches of a union pydantic tried; takes the setting out."""
        by_setting: dict[tuple[str, str], list[tuple[int | str, ...]]] = {}
        for error in errors:
            section, key, *rest = error["loc"]
            by_setting.setdefault((str(section), str(key)), []).append(tuple(rest))
        for (section, key), inner in by_setting.items():
            path = f"{section}.{key}"
            if path in self.wrong:
                pass  # given, but broken (an unset ${VAR}), and reported as that
            elif path not in self.leaves:
                self._missing(section, key, tree)
            elif self.leaves[path].is_mapping:
                self._wrong_entries(path, inner)
            elif sources := _wrong_items(path, self.leaves[path], inner):
                self.problems += sources
            else:
                self._wrong_value(section, key, _item(self.leaves[path], inner))
            self.wrong.add(path)
            self.values[section].pop(key, None)
            info = section_fields()[section].model_fields[key]
            if info.is_required():
                self.values[section][key] = "(not given)"

    def _missing(self, section: str, key: str, tree: Node) -> None:
        info = section_fields()[section].model_fields[key]
        node = tree.value.get(section)
        place = node.key_place if node is not None else tree.place
        example = f"; for example {info.examples[0]}" if info.examples else ""
        self.problems.append(
            Problem(place, f"{section}.{key}", "this key is required", f"{info.description}".rstrip(".") + example)
        )

    def _wrong_entries(self, path: str, inner: list[tuple[int | str, ...]]) -> None:
        """A mapping with entries of the wrong type (`env: {A: 1}`, `rank_pattern: {q_proj: high}`)."""
        section, _, key = path.partition(".")
        words = entry_words(section_fields()[section].model_fields[key].annotation)
        for name in dict.fromkeys(str(rest[0]) for rest in inner if rest):
            node = self.leaves[path].value[name]
            got = HIDDEN if is_secret(name) else shown(node.quotable())
            what = f"expected {words}; got {got}"
            self.problems.append(
                Problem(node.place, f"{path}.{name}", what, _quote_hint(node) if words == "a string" else "")
            )

    def _wrong_value(self, section: str, key: str, at: tuple[Node, str]) -> None:
        node, index = at
        path = f"{section}.{key}"
        info = section_fields()[section].model_fields[key]
        value = node.plain()
        # A list cannot be a dictionary key, and no list is among the refused values.
        refused = _REFUSED_VALUES.get((path, _as_word(value))) if not isinstance(value, list) else None
        if refused:
            self.problems.append(Problem(node.place, path, *refused))
            return
        words = "a string" if index else expected(info)
        most = LARGEST.get(type(value))
        if most is not None and most < abs(value) < math.inf:
            words += f" (the largest accepted value is {most:g})"
        fix = _meant_value(value, literal_words(info.annotation))
        if path == "train.warmup_steps" and isinstance(value, float) and 0 < value < 1:  # in SFTConfig, a share
            fix = f"for a share of the steps, set `train.warmup_ratio: {value:g}` instead"
        if not fix and accepts(info.annotation, str):
            fix = _quote_hint(node)
        self.problems.append(Problem(node.place, path + index, f"expected {words}; got {shown(node.quotable())}", fix))


def _wrong_items(path: str, node: Node, inner: list[tuple[int | str, ...]]) -> list[Problem]:
    """What is wrong inside the mappings of a list (`dataset_name_or_path: [{path: a.jsonl, weight: 0}]`)."""
    section, _, key = path.partition(".")
    item = item_section(section_fields()[section].model_fields[key].annotation)
    found: list[Problem] = []
    for rest in inner:
        index = next((part for part in rest if isinstance(part, int)), None)
        if item is None or index is None:
            continue
        if rest[-1] == index and not _accepts_text(path):
            keys = ", ".join(item.model_fields)
            what = f"expected a mapping ({keys}); got {shown(node.value[index].quotable())}"
            found.append(Problem(node.value[index].place, f"{path}[{index}]", what))
        if rest[-1] == index or not node.value[index].is_mapping:
            continue
        entry, key = node.value[index], str(rest[-1])
        where, info, value = f"{path}[{index}].{key}", item.model_fields.get(key), entry.value.get(key)
        if info is None and value is not None:
            close = nearest(key, item.model_fields)
            fix = f"did you mean `{close}`?" if close else f"the keys are {', '.join(item.model_fields)}"
            found.append(Problem(value.key_place, where, "unknown key", fix))
        elif info is not None and value is None:
            found.append(Problem(entry.place, where, "this key is required", str(info.description)))
        elif info is not None:
            found.append(Problem(value.place, where, f"expected {expected(info)}; got {shown(value.quotable())}"))
    return found


def _accepts_text(path: str) -> bool:
    """Whether items of this list may be plain strings too (`dataset_name_or_path: [a.jsonl, {path: b.jsonl}]`)."""
    section, _, key = path.partition(".")
    return accepts(section_fields()[section].model_fields[key].annotation, str)


def _item(node: Node, inner: list[tuple[int | str, ...]]) -> tuple[Node, str]:
    """The list item that is wrong rather than the whole list, where the error is about one."""
    for rest in inner:
        index = rest[-1] if rest else None
        if isinstance(index, int) and isinstance(node.value, tuple) and index < len(node.value):
            return node.value[index], f"[{index}]"
    return node, ""


def _as_word(value: Any) -> Any:
    if isinstance(value, str):
        word = value.lower().removeprefix("torch.").partition("_niter_")[0]  # pissa_niter_16 is PiSSA
        return {"yes": True, "on": True, "true": True, "fp16": "float16", "half": "float16"}.get(word, word)
    return value


def _meant_value(value: Any, words: list[str]) -> str:
    if not isinstance(value, str):
        return ""
    foreign = FOREIGN_VALUES.get(value.lower())
    close = foreign if foreign in words else nearest(value, words)
    return f"did you mean `{close}`?" if close else ""


def _quote_hint(node: Node) -> str:
    if not isinstance(node.value, int | float):
        return ""
    return "put quotes around it if it is meant as a string"
