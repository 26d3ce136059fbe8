from __future__ import annotations

import hashlib
import json
import os
import string
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shardtune.errors import UserInputError
from shardtune.quickstart import phrasings, sentences
from shardtune.quickstart.sentences import INTENTS, rows, same_sentence, write_dataset


def _slots_named(phrasing: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(phrasing) if name]


def _all_values(table: dict[str, tuple[str, ...]]) -> set[str]:
    return {value.casefold() for values in table.values() for value in values}


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_every_slot_is_a_piece_of_its_sentence_and_the_json_has_one_fixed_form(part: sentences.Part) -> None:
    for row in rows(part, 400, seed=7):
        answer = json.loads(row["json"])
        assert list(answer) == ["intent", "slots"]
        assert answer["intent"] in INTENTS
        assert answer["slots"], row
        for name, value in answer["slots"].items():
            assert name in phrasings.SLOTS[answer["intent"]]
            assert value in row["sentence"], row
        order = phrasings.SLOTS[answer["intent"]]
        assert list(answer["slots"]) == sorted(answer["slots"], key=order.index)
        assert row["json"] == sentences.answer_text(answer["intent"], answer["slots"])
        assert "  " not in row["sentence"]
        assert "{" not in row["sentence"]


def test_no_row_of_one_part_stands_in_another_whatever_the_seeds() -> None:
    keys = {
        part: {same_sentence(r["sentence"]) for seed in range(4) for r in rows(part, 600, seed)}
        for part in ("train", "val", "test")
    }
    assert not keys["train"] & keys["test"]
    assert not keys["val"] & keys["test"]
    assert not keys["train"] & keys["val"]


@pytest.mark.parametrize(("part", "n"), [("train", 2000), ("val", 300), ("test", 1000)])
def test_rows_of_a_part_are_all_different(part: sentences.Part, n: int) -> None:
    for seed in range(3):
        assert len({r["sentence"].casefold() for r in rows(part, n, seed)}) == n


def test_test_phrasings_and_values_are_held_out() -> None:
    train = {same_sentence(p) for table in phrasings.TRAIN_PHRASINGS.values() for p in table}
    test = {same_sentence(p) for table in phrasings.TEST_PHRASINGS.values() for p in table}
    assert not train & test
    assert not _all_values(phrasings.TRAIN_VALUES) & _all_values(phrasings.TEST_VALUES)


def test_openings_and_endings_of_the_test_part_are_held_out_too() -> None:
    assert not set(sentences._OPENINGS["train"]) & set(sentences._OPENINGS["test"])
    assert not set(sentences._ENDINGS["train"]) & set(sentences._ENDINGS["test"])


@pytest.mark.parametrize("intent", INTENTS)
def test_each_intent_has_many_phrasings_and_uses_only_its_slots(intent: str) -> None:
    assert len(set(phrasings.TRAIN_PHRASINGS[intent])) >= 20
    assert len(set(phrasings.TEST_PHRASINGS[intent])) >= 6
    for table in (phrasings.TRAIN_PHRASINGS, phrasings.TEST_PHRASINGS):
        named = [_slots_named(p) for p in table[intent]]
        assert all(names and len(set(names)) == len(names) for names in named)
        assert {name for names in named for name in names} == set(phrasings.SLOTS[intent])


def test_value_lists_are_large_clean_and_without_repeats() -> None:
    for table, least in ((phrasings.TRAIN_VALUES, 300), (phrasings.TEST_VALUES, 150)):
        assert sum(map(len, table.values())) >= least
        for slot, values in table.items():
            assert len({v.casefold() for v in values}) == len(values), slot
            assert all(v == " ".join(v.split()) and v and '"' not in v for v in values), slot


def test_intents_are_even_and_all_phrasings_come_up() -> None:
    drawn = rows("train", 320, seed=3)
    counts = Counter(json.loads(r["json"])["intent"] for r in drawn)
    assert set(counts.values()) == {40}
    few = rows("test", 64, seed=0)
    assert set(Counter(json.loads(r["json"])["intent"] for r in few).values()) == {8}


def test_case_and_final_marks_vary() -> None:
    texts = [r["sentence"] for r in rows("train", 800, seed=0)]
    lower = sum(t == t.lower() for t in texts) / len(texts)
    assert 0.1 < lower < 0.35
    endings = Counter(t[-1] if t[-1] in ".!?" else "" for t in texts)
    assert all(endings[mark] > 40 for mark in ("", ".", "!", "?"))
    assert any(t.startswith("Hey, ") for t in texts)


def test_a_slot_that_opens_the_sentence_takes_its_capital_in_the_answer_too() -> None:
    opened = []
    for row in rows("train", 1500, seed=0):
        for value in json.loads(row["json"])["slots"].values():
            if row["sentence"].startswith(value) and row["sentence"] != row["sentence"].lower():
                opened.append(value)
    assert len(opened) >= 10
    assert all(value[0].isupper() or value[0].isdigit() for value in opened)


def test_the_same_seed_gives_the_same_rows_in_another_process_with_another_hash_seed() -> None:
    code = "import json;from shardtune.quickstart.sentences import rows;print(json.dumps([rows(p,50,5) for p in ('train','val','test')]))"
    here = [rows("train", 50, 5), rows("val", 50, 5), rows("test", 50, 5)]
    root = Path(sentences.__file__).parents[2]
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert json.loads(result.stdout) == here


def test_another_seed_gives_other_rows() -> None:
    assert rows("train", 50, 0) != rows("train", 50, 1)
    assert rows("test", 50, 0) != rows("test", 50, 1)


def test_asking_for_more_rows_than_there_are_says_so() -> None:
    with pytest.raises(UserInputError, match="no further sentence"):
        rows("test", 50_000, seed=0)


def test_write_dataset_writes_three_files_of_the_sizes_asked_for(tmp_path: Path) -> None:
    paths = write_dataset(tmp_path / "data", seed=0, n_train=24, n_val=8, n_test=16)
    assert {part: path.name for part, path in paths.items()} == {
        "train": "train.jsonl", "val": "validation.jsonl", "test": "test.jsonl",
    }  # fmt: skip
    read = {
        part: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for part, path in paths.items()
    }
    assert read == {"train": rows("train", 24, 0), "val": rows("val", 8, 0), "test": rows("test", 16, 0)}
    digest = hashlib.sha256(paths["train"].read_bytes()).hexdigest()
    write_dataset(tmp_path / "data", seed=0, n_train=24, n_val=8, n_test=16)
    assert hashlib.sha256(paths["train"].read_bytes()).hexdigest() == digest


def test_the_generator_imports_no_torch() -> None:
    code = (
        "import sys; import shardtune.quickstart.sentences, shardtune.quickstart.recipe, shardtune.quickstart.weights, "
        "shardtune.quickstart.score; assert not {'torch','transformers','rich','tokenizers'} & set(sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(sentences.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
