"""`shardtune data prepare` and `data inspect`: words, files and exit codes."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_prepared import FakePrepared, fake_set
from toys import toy_config
from typer.testing import CliRunner

from shardtune.cli import data
from shardtune.data.checks import ModelLimits
from shardtune.data.inspect import format_found
from shardtune.data.prepare import ProgressInfo
from shardtune.errors import UserInputError
from shardtune.observe.preparing import PreparingProgress

ROWS = [([5, 6, 7, 2], 2), ([6, 7, 5, 5, 2], 3)] * 3
Given = dict[str, Any]


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    return toy_config(tmp_path, toy_model, toy_data)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """What `prepare` gives (`set`), and what it was asked with."""
    box: Given = {"set": fake_set(FakePrepared(ROWS), FakePrepared(ROWS[:2]))}

    def prepare(section: Any, seed: int, tokenizer: Any, name: str, **options: Any) -> Any:
        box.update(section=section, seed=seed, name=name, **options)
        return box["set"]

    monkeypatch.setitem(sys.modules, "shardtune.data.prepare", SimpleNamespace(prepare=prepare))
    return box


def run(*arguments: object) -> Any:
    return CliRunner().invoke(data.app, [str(each) for each in arguments], catch_exceptions=True)


def test_inspect_tells_numbers_of_both_splits(config: Path, given: Given) -> None:
    result = run("inspect", config)
    assert result.exit_code == 0, result.output
    assert "format    chat (the column 'messages' holds a list of messages)" in result.output
    assert "6 from 6 read" in result.output and "2 from 2 read" in result.output
    assert "⟦" not in result.output  # rows are shown when asked for


def test_inspect_shows_rows_with_marks(config: Path, given: Given) -> None:
    result = run("inspect", config, "--show", 2)
    assert "w00 w01⟦ w02⟨</s>⟩⟧" in result.output and "w01 w02 w00⟦ w00⟨</s>⟩⟧" in result.output
    assert "row 0:" in result.output and "row 3:" in result.output


def test_inspect_of_one_split_leaves_the_other_out(config: Path, given: Given) -> None:
    result = run("inspect", config, "--split", "val", "--show", 1)
    assert "== validation ==" in result.output and "== training ==" not in result.output
    assert "rows of val" in result.output


def test_a_split_that_is_not_there_is_an_answer(config: Path, given: Given) -> None:
    given["set"] = fake_set(FakePrepared(ROWS))
    result = run("inspect", config, "--split", "val")
    assert isinstance(result.exception, UserInputError) and "no validation rows" in result.exception.what


def test_inspect_writes_the_page(config: Path, given: Given, tmp_path: Path) -> None:
    result = run("inspect", config, "--show", 1, "--html", tmp_path / "data.html")
    assert f"page: {tmp_path / 'data.html'}" in result.output
    assert 'class="t learnt"' in (tmp_path / "data.html").read_text(encoding="utf-8")


def test_inspect_tells_everything_and_then_fails_when_train_would_refuse(config: Path, given: Given) -> None:
    given["set"] = fake_set(FakePrepared([([5, 80, 2], 1)]))
    result = run("inspect", config)
    assert result.exit_code == 2
    assert "1 from 1 read" in result.output
    assert "error: The training data contains token id 80, but the model has only 72 embeddings." in result.output


def test_prepare_tells_the_folder_and_how_to_copy_it(config: Path, given: Given) -> None:
    result = run("prepare", config, "--workers", 3, "-o", "train.seed=7")
    assert result.exit_code == 0, result.output
    assert "folder    /cache/ab" in result.output
    assert "6 rows from 6 read; 27 tokens, 44 % supervised; no row beyond max_length 64" in result.output
    assert "rsync -a /cache/ab HOST:/shared/\n  data.dataset_name_or_path: /shared/ab\n" in result.output
    assert "HOST:/shared/cache/cache/\n  data.cache_dir: /shared/cache\n" in result.output
    assert (given["workers"], given["seed"]) == (3, 7)


def test_prepare_prints_warnings(config: Path, given: Given) -> None:
    given["set"] = fake_set(FakePrepared(ROWS, duplicates=5))
    result = run("prepare", config)
    assert result.exit_code == 0 and "warning: 5 training rows (83 %) identical to an earlier row." in result.output


def test_prepare_refuses_what_train_would_refuse(config: Path, given: Given) -> None:
    given["set"] = fake_set(FakePrepared(ROWS, without_eos=6))
    result = run("prepare", config)
    assert isinstance(result.exception, UserInputError)
    assert result.exception.what == "No training row has a supervised end-of-sequence token."
    assert "folder    /cache/ab" in result.output  # what was prepared is told first


def test_a_model_without_its_config_leaves_tokens_unjudged(tmp_path: Path) -> None:
    from shardtune.config.schema import ModelSection

    assert data._limits(ModelSection(model_name_or_path=str(tmp_path))) == ModelLimits(None)


def test_what_prepare_says_about_copying_works(config: Path, tmp_path: Path) -> None:
    """With the real preparation: a copied folder, named as the data, is inspected where the data is not."""
    settings = ["-o", "data.val_split=validation", "-o", f"data.cache_dir={tmp_path / 'cache'}"]
    result = run("prepare", config, *settings)
    assert result.exit_code == 0, result.output
    folder = Path(next(line for line in result.output.splitlines() if line.startswith("folder")).split()[1])
    assert folder.is_dir() and folder.parent == tmp_path / "cache" / "prepared"
    copied = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, copied)
    inspected = run("inspect", config, *settings, "-o", f"data.dataset_name_or_path={copied}", "--show", 1)
    assert inspected.exit_code == 0, inspected.output
    assert "50 from 50 read" in inspected.output and "13 from 13 read" in inspected.output
    assert re.search(r"^w\d\d .*=>⟦ w.*⟨</s>⟩⟧$", inspected.output, re.MULTILINE)  # the answer, and only it


def test_a_mixture_is_named_with_its_weights() -> None:
    from shardtune.config.schema import DataSection

    section = DataSection(dataset_name_or_path=["a.jsonl", {"path": "b.jsonl", "weight": 0.5}])  # type: ignore[list-item]
    assert data.source_name(section) == "a.jsonl, b.jsonl × 0.5"


def test_a_mixture_of_formats_is_told_source_by_source() -> None:
    both = fake_set(FakePrepared(ROWS))
    assert format_found(both) == ("chat", "the column 'messages' holds a list of messages")
    both.about["sources"] = [
        {"path": "a.jsonl", "format": {"name": "chat", "why": "it has messages"}},
        {"path": "b.txt", "format": {"name": "text", "why": "it has lines"}},
    ]
    assert format_found(both) == ("chat and text", "a.jsonl: chat, it has messages; b.txt: text, it has lines")


def info(share: float, seconds: float, step: Any = "train", rows: int | None = None) -> ProgressInfo:
    return ProgressInfo(step, round(1000 * share) if rows is None else rows, round(9000 * share), share, seconds)


def told(capsys: pytest.CaptureFixture[str], *calls: tuple[float, ProgressInfo], terminal: bool = False) -> str:
    from rich.console import Console

    now = [0.0]
    with PreparingProgress(Console(width=120, force_terminal=terminal), clock=lambda: now[0]) as progress:
        for now[0], each in calls:
            progress(each)
    return capsys.readouterr().out


def test_progress_elsewhere_is_a_line_every_ten_seconds_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    calls = [(t, info(t / 40, t)) for t in (0.5, 1.0, 9.0, 10.5, 15.0)]
    assert told(capsys, *calls) == (
        "training rows: 1 %, 12 rows, 112 tokens\ntraining rows: 26 %, 262 rows, 2,362 tokens, 25 rows/s, 0:29 left\n"
    )


def test_progress_tells_the_beginning_of_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, (0.0, info(0, 0, "checking")), (3.0, info(1.0, 3.0)), (4.0, info(0.5, 1.0, "val")))
    assert text == (
        "training rows: 100 %, 1,000 rows, 9,000 tokens, 333 rows/s\n"
        "validation rows: 50 %, 500 rows, 4,500 tokens, 500 rows/s, 0:01 left\n"
    )


def test_progress_says_once_that_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, *((t, info(0, 0, "waiting")) for t in (1.0, 2.0, 60.0)))
    assert text == "waiting for another process that is preparing the same data\n"


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, (0.0, info(0, 0, "checking")), (10.0, info(0.25, 10.0)), terminal=True)
    assert "training rows" in text and "━" in text and "0:30 left" in text
