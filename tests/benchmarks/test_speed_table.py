"""The tables: what people read in a terminal, and what is written into a page between its markers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import table
from rows import ROWS
from running import REPOSITORY


def results(**changes: Any) -> dict[str, Any]:
    about = {
        "chip": "NVIDIA H200 (143771 MiB, driver 1)", "versions": {"torch": "2.11.0", "trl": "1.16.0", "triton": None},
        "date": "2026-11-15", "commit": "abc1234", "tiny": False, "pace": {"window": 2, "warm": 6, "windows": 6},
    }  # fmt: skip
    measured = {
        "dense-4k": {"tokens_per_second": 18000.4, "peak_gib": 45.25, "steps_counted": 12},
        "stock-dense": {"tokens_per_second": 10000.0, "peak_gib": 68.0, "steps_counted": 10},
        "unsloth-dense": {"why": "no --unsloth-site"},
        "moe36-fp8": {"tokens_per_second": 8000.0, "peak_gib": 130.0, "steps_counted": 12},
        "moe8-experts-ckpt": {"tokens_per_second": 30000.0, "peak_gib": 40.0, "steps_counted": 12},
        "stock-moe8-experts": {"tokens_per_second": 15000.0, "peak_gib": 50.0, "steps_counted": 12},
    }
    return {"about": {**about, **changes}, "measurements": measured}


def line_of(text: str, *words: str) -> str:
    (found,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return found


def test_the_terminal_shows_each_bar_with_its_ratio_and_verdict() -> None:
    text = table.text_table(results())
    dense = line_of(text, "dense-4k", "stock-dense ")
    assert "18,000" in dense and "10,000" in dense and "1.80×" in dense and dense.endswith("reached")
    assert line_of(text, "moe36-fp8", "≥ 9,000").endswith("MISSED")
    assert line_of(text, "moe36-fp8", "≤ 135").endswith("reached")
    assert line_of(text, "unsloth-dense", "≥ 1×").endswith("not measured (unsloth-dense: no --unsloth-site)")
    assert "dense-short" not in text  # it was not asked for


def test_the_page_says_what_was_measured_where_and_how_it_was_counted() -> None:
    text = table.markdown_table(results())
    row = line_of(text, "| Dense 7B, bf16, 4 × 4096 |")
    assert row == "| Dense 7B, bf16, 4 × 4096 | 18,000 | 45.2 | stock TRL, 2 × 4096 | 10,000 | 68.0 | 1.80× |"
    assert line_of(text, "| Unsloth").startswith("|  |  |  | Unsloth, 2 × 4096 | not measured: no --unsloth-site")
    assert line_of(text, "PEFT target_parameters", "too, checkpointing").endswith("| 2.00×, 0.80× memory |")
    assert "H200" in text and "torch 2.11.0" in text and "2026-11-15" in text and "abc1234" in text
    assert "triton" not in text
    assert "windows of 2 optimizer steps" in text and "10–12 steps counted" in text
    assert all(row.title in text for row in ROWS)  # what was not measured is told too


def test_a_page_keeps_everything_but_what_stands_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write_into(page, "new")
    table.write_into(page, "newer")
    assert page.read_text() == f"before\n{table.BEGIN}\nnewer\n{table.END}\nafter\n"


@pytest.mark.parametrize("text", ["nothing", f"{table.BEGIN}", f"{table.END} {table.BEGIN}"])
def test_a_page_without_a_place_for_the_table_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit, match="no place for the table"):
        table.write_into(page, "new")
    assert page.read_text() == text


def test_toys_are_not_written_into_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, numbers = tmp_path / "page.md", tmp_path / "speed.json"
    page.write_text(f"{table.BEGIN}\n{table.END}\n")
    monkeypatch.setattr(sys, "argv", ["table.py", str(numbers), "--readme", str(page)])
    numbers.write_text(json.dumps(results(tiny=True)))
    with pytest.raises(SystemExit, match="toys"):
        table.main()
    assert page.read_text() == f"{table.BEGIN}\n{table.END}\n"
    numbers.write_text(json.dumps(results()))
    table.main()
    assert "18,000" in page.read_text()


def test_the_readme_has_some_rows_of_the_whole_table() -> None:
    short, full = (table.table_of(REPOSITORY / page) for page in ("README.md", "docs/speed.md"))
    assert short == table.short_table(full), "make speed-table"
    assert len(short.splitlines()) == 2 + len(table.SHORT)


def test_both_tables_are_written_into_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, numbers = [tmp_path / "speed.md", tmp_path / "README.md"], tmp_path / "speed.json"
    for page in pages:
        page.write_text(f"{table.BEGIN}\n{table.END}\n")
    numbers.write_text(json.dumps(results()))
    monkeypatch.setattr(sys, "argv", ["table.py", str(numbers), "--page", str(pages[0]), "--readme", str(pages[1])])
    table.main()
    assert table.table_of(pages[1]) == table.short_table(table.table_of(pages[0]))
    assert "| Dense 7B, bf16, 4 × 4096 | 18,000 | 45.2 | stock TRL, 2 × 4096 | 1.80× |" in table.table_of(pages[1])
    assert "not measured" in table.table_of(pages[1]).splitlines()[4], "short rows"
