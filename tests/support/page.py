"""What does docs/support.md say? What the tests beside this file run, as tables: `python tests/support/page.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]  # run as a script

from support.features import HOW, ON_GPU, REFUSED, WHAT  # noqa: E402

from shardtune.model.families.family import Family  # noqa: E402
from shardtune.model.families.registry import families  # noqa: E402

YES, NO, OPEN, NONE = "✓", "refused", "untested", "–"
_HEAD = """\
# What works together

Generated from the tests by `make reference`: the tables below are those that `tests/support/` runs, and a test fails
when this page is out of date. ✓ means that a test compares losses and the gradients of every adapter with plain
transformers and PEFT. "refused" means that the run stops before training, with the reason and what to set instead, or
that `auto` falls back to the plain implementation and says so. "untested" means that no test covers it.

## Model families

- packed: documents in one row give the results of separate rows. Otherwise `train.packing: auto` is off.
- varlen: variable-length attention for packed rows on a GPU (`shardtune_varlen`). Otherwise `auto` uses sdpa or eager.
- compiled: decoder layers through `torch.compile` on a GPU, together with the other defaults there. Otherwise
  `train.compile: auto` is off.
- FP8: the base stored in float8 (`model.base_precision: fp8`). Expert LoRA: adapters on routed experts (`lora.experts`).
- sharded: two processes compute the same gradients as one.

{gpu}

"""
_FEATURES = """
## Features

Each pair was trained on toy models for three steps; losses and the evaluation equal those of the plain run: eager
kernels, one row per sequence, no activation checkpointing, one process. What needs a GPU (compiled layers and
offloading) is compared there, by `tests/gpu/test_features_gpu.py`.

"""


def support_page() -> str:
    """docs/support.md."""
    recorded = _recorded()
    by = recorded["by"]
    gpu = (
        f"Columns varlen and compiled: `tests/gpu/test_families_gpu.py` on {by['gpu']}, torch {by['torch']}."
        if by
        else "Columns varlen and compiled are filled in by `tests/gpu/test_families_gpu.py` on a GPU."
    )
    return _HEAD.format(gpu=gpu) + "\n".join(_family_table(recorded)) + "\n" + _reasons() + _FEATURES + _feature_table()


def _family_table(recorded: dict[str, list[str]]) -> Iterator[str]:
    yield from _table("model type", ["packed", "varlen", "compiled", "FP8", "expert LoRA", "sharded"])
    for family in families():
        for kind in family.model_types:
            yield _row(f"`{kind}`", _family_cells(family, kind, recorded))


def _family_cells(family: Family, kind: str, recorded: dict[str, list[str]]) -> list[str]:
    def on_gpu(path: str) -> str:
        return YES if kind in recorded[path] else OPEN

    held = not family.experts or "fused_experts" in family.proven
    return [
        YES if "packing" in family.proven else NO,
        on_gpu("varlen") if "varlen" in family.proven else NO,
        on_gpu("compile"),
        YES if held else NO,
        (YES if held else NO) if family.experts else NONE,
        YES,
    ]


def _reasons() -> str:
    lines = [f"- {family.name}, {path}: {why}." for family in families() for path, why in family.unsupported.items()]
    return (
        "\nWhy not:\n\n"
        + "\n".join(lines)
        + "\n\nAn architecture that is not listed is inspected, and uses none of these.\n"
    )


def _recorded() -> dict[str, Any]:
    """What passed on a GPU, and on which."""
    return json.loads((HERE / "gpu.json").read_text(encoding="utf-8"))


def _feature_table() -> str:
    rows: list[str] = []
    for columns in ([*HOW, *ON_GPU], [name for name in WHAT if name != "LoRA"]):
        rows += _table("", columns)
        rows += [_row(what, [_feature_cell(what, column) for column in columns]) for what in WHAT]
        rows.append("")
    why = [f"- {' + '.join(sorted(pair))}: {reason}" for pair, reason in REFUSED.items()]
    return "\n".join([*rows, "Why not:", "", *why] if why else rows[:-1]) + "\n"


def _feature_cell(what: str, column: str) -> str:
    if what == column:
        return YES
    if column in ON_GPU:
        return YES if what in _recorded()["features"] else OPEN
    return NO if frozenset({what, column}) in REFUSED else YES


def _table(first: str, columns: list[str]) -> Iterator[str]:
    yield _row(first, columns)
    yield _row("---", ["---"] * len(columns))


def _row(first: str, cells: list[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


if __name__ == "__main__":
    print(support_page(), end="")
