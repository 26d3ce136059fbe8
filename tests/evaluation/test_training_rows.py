"""Rows that the model was trained on are counted, and changed data is not taken for that of the training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from evaluated_run import fake_run
from toys import toy_llama, toy_rows

from shardtune.data.prepare import prepare
from shardtune.evaluation.rows import DataChoice, Rows, read_rows
from shardtune.inference.load import load_tuned_tokenizer
from shardtune.inference.source import find_tuned
from shardtune.model.load import model_folder
from shardtune.report.evaluations import seen_in_training


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 50 training and 40 validation rows, which are in the cache as training leaves them."""
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))
    made = fake_run(tmp_path, toy_llama(tmp_path / "model"), toy_rows(tmp_path / "data", val_rows=40))
    tuned = find_tuned(str(made))
    assert tuned.config is not None
    found = prepare(tuned.config.data, 42, load_tuned_tokenizer(tuned, model_folder(tuned.base)), "toy")
    assert found.val is not None
    event = {"event": "data", "folder": str(found.folder), "validation": found.val.counts.as_dict()}
    (made / "events-rank0.jsonl").write_text(json.dumps({"v": 2, "time": 1.0, "rank": 0, **event}) + "\n")
    return made


def rows_of(run: Path, data: Path | None = None, **choice: object) -> Rows:
    tuned = find_tuned(str(run))
    wanted = DataChoice(str(data) if data is not None else None, **choice)  # type: ignore[arg-type]
    return read_rows(tuned, wanted, load_tuned_tokenizer(tuned, model_folder(tuned.base)))


def lines(run: Path, split: str) -> list[str]:
    return (run.parents[1] / "data" / f"{split}.jsonl").read_text().splitlines(keepends=True)


def test_evaluated_rows_that_are_training_rows_are_counted(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mixed.jsonl").write_text("".join([*lines(run, "train")[:12], *lines(run, "validation")[:3]]))
    mixed = rows_of(run, tmp_path / "mixed.jsonl")
    assert mixed.training_rows == 12 and not mixed.is_training_split
    assert mixed.warnings == [
        "12 of 15 rows are also training rows: the numbers say little about rows that the model has not seen."
    ]
    assert rows_of(run).training_rows == 0 and not rows_of(run).warnings
    assert rows_of(run, split="train", max_rows=20).training_rows == 20


def test_without_the_prepared_rows_the_training_split_is_still_known(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "cache")
    found = rows_of(run, split="train")
    assert found.training_rows is None and found.is_training_split
    assert "The run was trained on this split" in found.warnings[0]
    assert not rows_of(run, split="validation").warnings
    in_other_words = rows_of(run, split="train", overrides=("data.prompt_template={question} : {answer}",))
    assert in_other_words.warnings == found.warnings


def test_rows_of_another_format_than_the_run_s_are_named(run: Path, tmp_path: Path) -> None:
    chat = {"name": "chat", "why": "column 'messages'", "columns": ["messages"]}
    recorded = {"v": 2, "time": 1.0, "rank": 0, "event": "data", "folder": "x", "format": chat}
    (run / "events-rank0.jsonl").write_text(json.dumps(recorded) + "\n")
    (warning,) = rows_of(run, tmp_path / "data", split="validation").warnings
    assert "These are prompt rows, and the run was trained on chat rows (column 'messages')" in warning


@pytest.mark.parametrize("in_cache", [True, False])
def test_changed_validation_rows_are_not_called_those_of_the_run(run: Path, tmp_path: Path, in_cache: bool) -> None:
    file = tmp_path / "data" / "validation.jsonl"
    assert not rows_of(run).changed
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:25]))
    if not in_cache:
        shutil.rmtree(tmp_path / "cache")
    found = "The data has changed since training (its files or the tokenizer): 25 validation rows now, 40 then."
    assert rows_of(run).warnings == [found]
    assert not rows_of(run, overrides=("data.max_length=32",)).changed  # other rows are asked for
    file.write_text(file.read_text().replace("w0", "w1"))
    assert rows_of(run).changed


def test_rows_without_the_answers_column_are_not_left_out_silently(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text("".join(lines(run, "validation")))
    (tmp_path / "mixed" / "b.jsonl").write_text('{"question": "w01", "other": "w02"}\n' * 9)
    (found,) = rows_of(run, tmp_path / "mixed").warnings
    assert found.startswith("9 of 49 rows dropped as empty: The column 'answer' is missing, null or blank; first in ")
    assert "b.jsonl" in found


def test_the_report_and_the_card_say_it_in_a_few_words() -> None:
    assert seen_in_training({"training_rows": 12, "training_split": True}) == ["12 of them also training rows"]
    assert seen_in_training({"training_rows": 0, "training_split": True}) == ["which the run was trained on"]
    assert seen_in_training({"changed_since_training": True}) == ["changed since training"]
    assert seen_in_training({}) == []
