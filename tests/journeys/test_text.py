"""Rows of plain text: the first thing anybody tries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_story import LENGTH, check_run, write_config
from journey import Journey, read_events
from reference import Example, load, score, text_example


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_text_file_is_one_text_cut_into_rows_of_max_length(journey: Journey, chat_model: Path) -> None:
    """Lines keep their breaks, blank ones are left out, and the end token stands where the file ends."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    files = {}
    for name, numbers in (("train", range(60)), ("validation", range(100, 112))):
        lines = [f"§ {n}: Ein Satz über {'viele ' * (n % 7)}Dinge — “naïve” 文 {n * n}." for n in numbers]
        files[name] = [line if n % 4 else "" for n, line in enumerate(lines)]
        path = journey.folder / "data" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes("\r\n".join(files[name]).encode())
    write_config(journey, chat_model)
    journey.shardtune("train", "run.yaml")

    def rows(name: str) -> list[Example]:
        whole = text_example(tokenizer, "".join(f"{line}\n" for line in files[name] if line))
        starts = range(0, len(whole.ids), LENGTH)
        return [Example(whole.ids[at : at + LENGTH], whole.labels[at : at + LENGTH]) for at in starts]

    check_run(journey.only_run(), chat_model, rows("train"), rows("validation"))
