"""Rows of plain text: the first thing anybody tries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journey import Journey, read_events
from reference import load, score, text_example


def test_plain_text_trains_and_the_adapter_scores_what_the_run_said(journey: Journey, toy_model: Path) -> None:
    from transformers import AutoTokenizer

    rows = [" ".join(f"w{(7 * i + j) % 60:02d}" for j in range(3 + i)) for i in range(21)]
    for name, part in (("train", rows[5:]), ("validation", rows[:5])):
        path = journey.folder / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in part), encoding="utf-8")
    journey.write_config(
        model={"model_name_or_path": str(toy_model), "torch_dtype": "float32"},
        lora={"r": 4, "target_modules": "all-linear"},
        data={"dataset_name_or_path": "data", "val_split": "validation", "max_length": 64},
        train={"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 4},
    )
    journey.shardtune("train", "run.yaml")
    run = journey.only_run()
    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    plain = score(load(toy_model, run / "final"), [text_example(tokenizer, row) for row in rows[:5]])
    said = read_events(run, "eval")[-1]
    assert said["loss"] == pytest.approx(plain.loss, abs=2e-5)
