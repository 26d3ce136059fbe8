"""Conversations in the forms people have them in, from a cold start, with the numbers that plain code finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversations import Message, conversations
from journey import Journey, read_events
from reference import IGNORED, Example, chat_example, load, score

LENGTH = 160
TRAIN, VALIDATION = conversations(34), conversations(6, first=100)


def write_rows(journey: Journey, train: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> None:
    for name, rows in (("train", train), ("validation", validation)):
        path = journey.folder / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_config(journey: Journey, model: Path, **data: Any) -> Path:
    return journey.write_config(
        model={"model_name_or_path": str(model), "torch_dtype": "float32"},
        lora={"r": 4, "target_modules": "all-linear"},
        data={"dataset_name_or_path": "data", "val_split": "validation", "max_length": LENGTH, **data},
        train={"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 4},
    )


def examples(model: Path, rows: Sequence[list[Message]]) -> list[Example]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [chat_example(tokenizer, messages).cut(LENGTH) for messages in rows]


def counts(rows: Sequence[Example]) -> tuple[int, int, int]:
    """Rows, tokens and supervised tokens."""
    supervised = sum(label != IGNORED for row in rows for label in row.labels)
    return len(rows), sum(len(row.ids) for row in rows), supervised


def said_counts(run: Path, side: str = "train") -> tuple[int, int, int]:
    said = read_events(run, "data")[-1][side]
    return said["rows"], said["tokens"], said["supervised"]


def check_run(run: Path, model: Path) -> None:
    """What the run says of its data and its adapter is what plain code finds."""
    assert said_counts(run) == counts(examples(model, TRAIN))
    validation = examples(model, VALIDATION)
    assert said_counts(run, "validation") == counts(validation)
    plain = score(load(model, run / "final"), validation)
    assert read_events(run, "eval")[-1]["loss"] == pytest.approx(plain.loss, abs=2e-5)


def test_chat_with_a_text_column_beside_it_trains_on_the_chat_and_so_does_the_runs_own_config(
    journey: Journey, chat_model: Path
) -> None:
    rows = [
        [{"id": n, "text": f"summary {n}", "messages": m} for n, m in enumerate(side)] for side in (TRAIN, VALIDATION)
    ]
    write_rows(journey, *rows)
    write_config(journey, chat_model)
    done = journey.shardtune("train", "run.yaml")
    told = "chat (column 'messages' holds messages in the OpenAI form; not read: 'text' (set data.format: text to train"
    assert told in " ".join(done.stdout.split())
    first = journey.only_run()
    check_run(first, chat_model)
    inspected = journey.shardtune("data", "inspect", "run.yaml").stdout
    assert f"tokens    {counts(examples(chat_model, TRAIN))[1]:,}, " in inspected

    journey.shardtune(
        "train", first / "config.yaml", "--run-id", "again", env={"SHARDTUNE_CACHE": str(journey.home / "c")}
    )
    again = journey.folder / "runs" / "again"
    check_run(again, chat_model)
    assert [e["loss"] for e in read_events(again, "eval")] == [e["loss"] for e in read_events(first, "eval")]
