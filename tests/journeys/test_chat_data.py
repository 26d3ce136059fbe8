"""Conversations in the forms people have them in, from a cold start, with the numbers that plain code finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from conversations import Message, as_sharegpt, conversations
from data_story import LENGTH, check_run, counts, said_counts, write_config, write_jsonl
from journey import Journey, read_events
from reference import Example, chat_example, load, score

TRAIN, VALIDATION = conversations(34), conversations(6, first=100)


def examples(model: Path, rows: Sequence[list[Message]], length: int = LENGTH) -> list[Example]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [chat_example(tokenizer, messages).cut(length) for messages in rows]


@pytest.mark.slow
def test_chat_with_a_text_column_beside_it_trains_on_the_chat_and_so_does_the_runs_own_config(
    journey: Journey, chat_model: Path
) -> None:
    for name, side in (("train", TRAIN), ("validation", VALIDATION)):
        rows = [{"id": number, "text": f"summary {number}", "messages": each} for number, each in enumerate(side)]
        write_jsonl(journey.folder / "data" / f"{name}.jsonl", rows)
    write_config(journey, chat_model)
    done = journey.shardtune("train", "run.yaml")
    told = (
        "chat (column 'messages' contains messages in OpenAI format; not read: 'text' (set data.format: text to train"
    )
    assert told in " ".join(done.stdout.split())
    first = journey.only_run()
    train, validation = examples(chat_model, TRAIN), examples(chat_model, VALIDATION)
    check_run(first, chat_model, train, validation)
    inspected = journey.shardtune("data", "inspect", "run.yaml").stdout
    assert f"tokens    {counts(train)[1]:,}, " in inspected

    cold = {"SHARDTUNE_CACHE": str(journey.home / "elsewhere")}
    journey.shardtune("train", first / "config.yaml", "--run-id", "again", env=cold)
    again = journey.folder / "runs" / "again"
    check_run(again, chat_model, train, validation)
    assert [e["loss"] for e in read_events(again, "eval")] == [e["loss"] for e in read_events(first, "eval")]


@pytest.mark.slow
def test_sharegpt_with_system_prompts_in_a_column_trains_after_an_inspection_as_without(
    journey: Journey, chat_model: Path
) -> None:
    for name, side in (("train", TRAIN), ("validation", VALIDATION)):
        rows = []
        for messages in side:
            row = as_sharegpt(messages)
            if row["conversations"][0]["from"] == "system":
                row["system"] = row["conversations"].pop(0)["value"]
            rows.append(row)
        write_jsonl(journey.folder / "data" / f"{name}.jsonl", rows)
    # An empty system prompt in a column is none: the template then writes its own.
    spoken = [
        [[m for m in messages if m["role"] != "system" or m["content"]] for messages in side]
        for side in (TRAIN, VALIDATION)
    ]
    write_config(journey, chat_model)
    assert "in ShareGPT format, with 'system'" in journey.shardtune("data", "inspect", "run.yaml").stdout
    journey.shardtune("train", "run.yaml")
    check_run(journey.only_run(), chat_model, examples(chat_model, spoken[0]), examples(chat_model, spoken[1]))


_ANIMALS = ["otter", "heron", "mole", "carp", "lynx", "toad", "wren", "ibex", "newt", "seal", "crow", "moth"]
_PLACES = ["the weir", "platform 9", "a Kleingarten", "São Miguel", "the night bus", "row 42", "the old mill"]


def sightings(numbers: range) -> list[list[Message]]:
    """A made-up convention that no model knows: the record is written backwards, with a fixed code."""
    rows = []
    for number in numbers:
        animal, place = _ANIMALS[number % len(_ANIMALS)], _PLACES[number % len(_PLACES)]
        messages = [
            {"role": "user", "content": f"Log it: I saw a {animal} near {place}."},
            {"role": "assistant", "content": f"ZK-{len(animal)} | {place} <- {animal} | confirmed: ja"},
        ]
        if number % 5 == 0:
            messages += [
                {"role": "user", "content": "And again, twice."},
                {"role": "assistant", "content": f"ZK-{len(animal)} | {place} <- {animal} | confirmed: ja, ja"},
            ]
        rows.append([{"role": "system", "content": "You keep the log."}, *messages] if number % 3 == 0 else messages)
    return rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_model_learns_a_chat_file_and_writes_better_on_rows_it_never_saw(
    journey: Journey, smollm2: Path
) -> None:
    train, validation = sightings(range(60)), sightings(range(60, 66))
    write_jsonl(journey.folder / "log.jsonl", [{"messages": messages} for messages in [*train, *validation]])
    write_config(
        journey, smollm2, train={"max_steps": 12, "learning_rate": 2e-3, "eval_steps": 12},
        dataset_name_or_path="log.jsonl", train_split="train[:60]", val_split="train[60:]",
    )  # fmt: skip
    journey.shardtune("train", "run.yaml", timeout=1500)
    run = journey.only_run()
    held_out = examples(smollm2, validation)
    assert said_counts(run) == counts(examples(smollm2, train))
    before, after = score(load(smollm2), held_out), score(load(smollm2, run / "final"), held_out)
    assert after.loss < before.loss / 3, (before, after)
    assert read_events(run, "eval")[-1]["loss"] == pytest.approx(after.loss, abs=1e-3)
