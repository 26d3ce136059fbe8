"""What is the same in every story about data: a small run, and its numbers beside those that plain code finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from journey import Journey, read_events
from reference import IGNORED, Example, load, score

LENGTH = 160


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_config(journey: Journey, model: Path, *, train: dict[str, Any] | None = None, **data: Any) -> Path:
    return journey.write_config(
        model={"model_name_or_path": str(model), "torch_dtype": "float32"},
        lora={"r": 4, "target_modules": "all-linear"},
        data={"dataset_name_or_path": "data", "val_split": "validation", "max_length": LENGTH, **data},
        train={"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 4, **(train or {})},
    )


def counts(rows: Sequence[Example]) -> tuple[int, int, int]:
    """Rows, tokens, and supervised tokens (the first of a row is predicted by nothing)."""
    supervised = sum(label != IGNORED for row in rows for label in row.labels[1:])
    return len(rows), sum(len(row.ids) for row in rows), supervised


def said_counts(run: Path, side: str = "train") -> tuple[int, int, int]:
    said = read_events(run, "data")[-1][side]
    return said["rows"], said["tokens"], said["supervised"]


def check_run(run: Path, model: Path, train: Sequence[Example], validation: Sequence[Example]) -> None:
    """What the run says of its data and of its adapter is what plain code finds, tokens and loss."""
    assert said_counts(run) == counts(train)
    assert said_counts(run, "validation") == counts(validation)
    plain = score(load(model, run / "final"), validation)
    assert read_events(run, "eval")[-1]["loss"] == pytest.approx(plain.loss, abs=2e-5)
