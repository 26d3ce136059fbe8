from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from toys import WORDS

from shardtune.config.schema import RunConfig
from shardtune.data.estimate import DataSize, data_size
from shardtune.data.prepare import prepare
from shardtune.errors import UserInputError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))


def text_rows(count: int, longest: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [{"text": " ".join(rng.choices(WORDS, k=rng.randint(3, longest)))} for _ in range(count)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def config(data: Path | list[dict[str, Any]], tokenizer: Any, **settings: Any) -> RunConfig:
    given = str(data) if isinstance(data, Path) else data
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": tokenizer.name_or_path},
            "data": {"dataset_name_or_path": given, "max_length": 64, **settings},
        }
    )


def prepared(run: RunConfig, tokenizer: Any) -> Any:
    return prepare(run.data, run.train.seed, tokenizer, run.model.model_name_or_path, workers=1)


def sized(run: RunConfig, tokenizer: Any) -> DataSize:
    size = data_size(run, Path(tokenizer.name_or_path))
    assert size is not None
    return size


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_length": 32}, {"max_length": 32, "long_rows": "split"}, {"val_split": 0.2}, {"concatenate": True}],
    ids=str,
)
def test_the_estimate_is_near_what_preparing_counts(tmp_path: Path, words: Any, settings: dict[str, Any]) -> None:
    run = config(written(tmp_path / "rows.jsonl", text_rows(600)), words, **settings)
    estimate = sized(run, words)
    assert not estimate.exact and "estimated from 600 rows" in estimate.how
    actual = prepared(run, words)
    assert estimate.rows == pytest.approx(actual.train.counts.rows, rel=0.05)
    assert estimate.tokens == pytest.approx(actual.train.counts.tokens, rel=0.05)
    assert estimate.sequences == pytest.approx(len(actual.train.packs(run.data.max_length)), rel=0.06)
    assert estimate.validation == pytest.approx(actual.val.counts.rows if actual.val else 0, rel=0.25)


def test_what_was_prepared_is_counted_until_the_file_changes(tmp_path: Path, words: Any) -> None:
    file = written(tmp_path / "rows.jsonl", text_rows(50))
    run = config(file, words)
    actual = prepared(run, words)
    size = sized(run, words)
    assert size.exact and (size.rows, size.tokens) == (50, actual.train.counts.tokens)
    assert size.sequences == len(actual.train.packs(64))
    assert not sized(config(file, words, max_length=48), words).exact, "another setting makes other rows"
    given = config(actual.folder, words)
    assert sized(given, words).exact, "a prepared folder may be the dataset itself"
    time.sleep(0.01)
    written(file, text_rows(70))
    assert sized(run, words).rows == 70


def test_a_large_file_is_sampled_from_all_over_it_in_under_a_second(tmp_path: Path, words: Any) -> None:
    rows = text_rows(500)
    short = "".join(json.dumps(row) + "\n" for row in rows) * 150
    long = json.dumps({"text": " ".join(WORDS)}) + "\n"
    file = tmp_path / "rows.jsonl"
    file.write_text(short + long * 60_000, encoding="utf-8")
    assert file.stat().st_size > 20e6
    began = time.process_time()
    size = sized(config(file, words), words)
    assert time.process_time() - began < 3, "of a file that takes minutes to prepare"
    tokens = 150 * sum(len(row["text"].split()) + 1 for row in rows) + 60_000 * 61
    assert size.rows == pytest.approx(135_000, rel=0.1)
    assert size.tokens == pytest.approx(tokens, rel=0.1)


def test_compressed_and_tabular_files_and_mixtures_are_sampled_too(tmp_path: Path, words: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = text_rows(400)
    plain = written(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("text\n" + "\n".join(row["text"] for row in rows), encoding="utf-8")
    expected = sized(config(plain, words), words)
    for name in ("rows.jsonl.gz", "rows.parquet", "rows.csv"):
        found = sized(config(tmp_path / name, words), words)
        assert (found.rows, found.tokens) == (expected.rows, expected.tokens), name
    both = [{"path": str(plain), "weight": 2}, {"path": str(tmp_path / "rows.csv"), "split": "train[:50%]"}]
    assert sized(config(both, words), words).rows == 1000


def test_conversations_count_the_tokens_of_their_template(tmp_path: Path, words: Any) -> None:
    talk = [{"role": "user", "content": "w01 w02 w03"}, {"role": "assistant", "content": "w04 w05"}]
    size = sized(config(written(tmp_path / "rows.jsonl", [{"messages": talk}] * 20), words), words)
    assert size.rows == 20
    assert 20 * 5 < size.tokens < 20 * 20


def test_without_a_tokenizer_on_disk_or_files_the_answer_says_so(tmp_path: Path, words: Any) -> None:
    run = config(written(tmp_path / "rows.jsonl", text_rows(20)), words)
    size = data_size(run, None)
    assert size is not None and "4 characters per token" in size.how
    assert data_size(config(Path("org/dataset"), words), None) is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [("validation.jsonl", {}), ("train.jsonl", {"val_split": "test"}), ("x.jsonl", {"train_split": "dev"})],
)
def test_a_split_that_is_not_there_is_refused_as_preparing_refuses_it(
    tmp_path: Path, words: Any, name: str, settings: dict[str, Any]
) -> None:
    (tmp_path / "set").mkdir()
    written(tmp_path / "set" / name, text_rows(20))
    run = config(tmp_path / "set", words, **settings)
    with pytest.raises(UserInputError) as said:
        data_size(run, None)
    with pytest.raises(UserInputError) as said_by_preparing:
        prepared(run, words)
    assert "has no split" in said.value.what
    assert str(said.value) == str(said_by_preparing.value)


def test_some_sources_of_a_mixture_may_lack_the_validation_split(tmp_path: Path, words: Any) -> None:
    (tmp_path / "set").mkdir()
    written(tmp_path / "set" / "train.jsonl", text_rows(20))
    written(tmp_path / "set" / "test.jsonl", text_rows(5))
    file = written(tmp_path / "rows.jsonl", text_rows(20))
    sources = [{"path": str(file)}, {"path": str(tmp_path / "set")}]
    assert sized(config(sources, words, val_split="test"), words).validation == 5
    with pytest.raises(UserInputError, match=r"rows.jsonl' has no split 'dev'"):
        data_size(config(sources, words, val_split="dev"), None)


def test_a_folder_that_datasets_wrote_is_asked_for_its_splits(tmp_path: Path, words: Any) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(text_rows(5))}).save_to_disk(tmp_path / "set")
    assert data_size(config(tmp_path / "set", words), None) is None
    with pytest.raises(UserInputError, match="has no split 'dev'"):
        data_size(config(tmp_path / "set", words, train_split="dev"), None)


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, words: Any) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserInputError, match=r"rows.parquet' could not be read"):
        data_size(config(tmp_path / "rows.parquet", words), None)
