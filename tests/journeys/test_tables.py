"""Rows of tables: instructions in CSV, with commas or semicolons, and pairs in parquet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
from conversations import conversations
from data_story import LENGTH, check_run, write_config
from journey import Journey, read_events
from reference import Example, pair_example

Row = dict[str, str]


def rows(count: int, first: int = 0) -> list[Row]:
    """What was asked first in a conversation, and the answer: commas, quotes, line breaks and all."""
    found = []
    for number, messages in enumerate(conversations(count, first), start=first):
        asked, answered = (next(m["content"] for m in messages if m["role"] == role) for role in ("user", "assistant"))
        found.append(
            {"id": f"{number:03d}", "Frage": asked, "Antwort": answered + (" (sic; 1,5 %)" if number % 2 else "")}
        )
    return found


TRAIN, VALIDATION = rows(30), rows(7, first=50)


def write_csv(path: Path, table: Sequence[Row], delimiter: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8-sig", newline="") as file:  # as Excel writes it
        writer = csv.DictWriter(file, list(table[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(table)


def examples(model: Path, table: Sequence[Row], between: str) -> list[Example]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [pair_example(tokenizer, row["Frage"] + between, row["Antwort"]).cut(LENGTH) for row in table]


@pytest.mark.slow
def test_a_csv_with_semicolons_trains_and_the_delimiter_and_the_space_before_answers_are_told(
    journey: Journey, chat_model: Path
) -> None:
    for name, table in (("train", TRAIN), ("validation", VALIDATION)):
        write_csv(journey.folder / "data" / f"{name}.csv", table, ";")
    write_config(journey, chat_model, prompt_template="{Frage} {Antwort}")
    said = " ".join(journey.shardtune("train", "run.yaml").stdout.split())
    assert "the answer is 'Antwort'; cells are separated by semicolons; the space before the answer" in said
    run = journey.only_run()
    check_run(run, chat_model, examples(chat_model, TRAIN, " "), examples(chat_model, VALIDATION, " "))


@pytest.mark.slow
def test_an_instruction_csv_with_commas_trains_the_same_rows_whatever_stands_between_them(
    journey: Journey, chat_model: Path
) -> None:
    for name, table in (("train", TRAIN), ("validation", VALIDATION)):
        write_csv(journey.folder / "data" / f"{name}.csv", table, ",")
    write_config(journey, chat_model, prompt_template="{Frage}\n### Antwort\n{Antwort}")
    said = journey.shardtune("train", "run.yaml").stdout
    assert "separated" not in said and "space before" not in said
    between = "\n### Antwort\n"
    run = journey.only_run()
    check_run(run, chat_model, examples(chat_model, TRAIN, between), examples(chat_model, VALIDATION, between))


@pytest.mark.slow
def test_pairs_in_parquet_train_and_a_second_run_takes_them_from_the_cache(journey: Journey, chat_model: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (journey.folder / "data").mkdir()
    for name, table in (("train", TRAIN), ("validation", VALIDATION)):
        pairs = {"prompt": [row["Frage"] + "\n" for row in table], "completion": [row["Antwort"] for row in table]}
        parquet.write_table(
            pa.table({**pairs, "score": [0.5] * len(table)}), journey.folder / "data" / f"{name}.parquet"
        )
    write_config(journey, chat_model)
    train, validation = examples(chat_model, TRAIN, "\n"), examples(chat_model, VALIDATION, "\n")
    journey.shardtune("train", "run.yaml", "--run-id", "first")
    (made,) = (journey.home / ".cache" / "shardtune" / "prepared").glob("*/set.json")
    written = made.stat().st_mtime_ns
    journey.shardtune("train", "run.yaml", "--run-id", "second")
    assert made.stat().st_mtime_ns == written
    runs = [journey.folder / "runs" / name for name in ("first", "second")]
    for run in runs:
        check_run(run, chat_model, train, validation)
    first, second = ([event["loss"] for event in read_events(run, "step")] for run in runs)
    assert first == second


@pytest.mark.slow
def test_a_weighted_mixture_takes_each_source_as_often_as_it_says(journey: Journey, chat_model: Path) -> None:
    """Half of a source is drawn at random, so all its rows have as many tokens."""
    equal = [{"id": str(n), "Frage": f"{n:03d}?", "Antwort": f"{n:03d}!"} for n in range(100, 120)]
    write_csv(journey.folder / "often" / "train.csv", TRAIN, ",")
    write_csv(journey.folder / "often" / "validation.csv", VALIDATION, "|")
    write_csv(journey.folder / "half" / "train.csv", equal, "\t")
    sources = [{"path": "often", "weight": 3}, {"path": "half", "weight": 0.5}]
    write_config(journey, chat_model, prompt_template="{Frage}\n{Antwort}", dataset_name_or_path=sources)
    journey.shardtune("train", "run.yaml")
    train = examples(chat_model, TRAIN, "\n") * 3 + examples(chat_model, equal, "\n")[:10]
    check_run(journey.only_run(), chat_model, train, examples(chat_model, VALIDATION, "\n"))
