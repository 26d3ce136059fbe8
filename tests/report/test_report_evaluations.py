"""A run's page shows what `shardtune eval` has found: with intervals, the newest first, whatever stands in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Visit
from fake_run import showcase

from shardtune.checkpoint.final import FinalSource, write_source
from shardtune.evaluation import result
from shardtune.report import evaluations
from shardtune.report.api import RunsApi
from shardtune.report.evaluations import with_interval
from shardtune.report.history import RunHistory
from shardtune.report.page import write_page
from shardtune.report.view import run_view


def estimate(value: float | None, low: float | None = None, high: float | None = None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}


def metric(name: str, kind: str, base: Any, tuned: Any, difference: Any, verdict: str) -> dict[str, Any]:
    sides = {"base": estimate(*base), "tuned": estimate(*tuned), "difference": estimate(*difference)}
    return {"name": name, "title": name.replace("_", " "), "kind": kind, **sides, "verdict": verdict}


def save(run: Path, name: str, time: float, **changes: Any) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    found = {
        "schema": 1, "time": time, "checkpoint": "final", "sides": ["base", "tuned"],
        "data": {"path": "data/test.jsonl", "split": "test", "own_validation": False, "rows": 48, "of_rows": 12_034},
        "metrics": [
            metric("loss", "number", (3.4901, 3.3625, 3.6163), (0.0551, 0.0387, 0.0729), (-3.435, -3.5633, -3.3064), "better"),
            metric("exact_match", "share", (0.0, 0.0, 0.074), (0.708, 0.568, 0.818), (0.708, 0.55, 0.818), "better"),
            metric("json_precision", "share", (None,), (0.909, 0.858, 0.957), (None,), ""),
        ],
        "tasks": [{"task": "arc_easy", "filter": "none", **metric("acc", "share", (0.5, 0.4, 0.6), (0.51, 0.41, 0.61), (0.01, -0.02, 0.04), "unclear")}],
        "notes": ["34 of 48 answers of the base model were cut off at 65 tokens."],
        "left_out": [{"metric": "json", "why": "no expected answer is a JSON object or list"}],
        **changes,
    }  # fmt: skip
    (run / "evaluations" / f"{name}.json").write_text(json.dumps(found))


def save_rows(run: Path, name: str) -> None:
    wrong = {"row": 7, "prompt": "What is it?", "expected": "this", "base": "that", "tuned": "<b>those</b>"}
    rows = [{"row": 1, "exact_match": {"tuned": True}}, {**wrong, "exact_match": {"base": False, "tuned": False}}]
    (run / "evaluations" / f"{name}.rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_newest_comes_first_with_its_rows(tmp_path: Path) -> None:
    for name, time in (("a", 1e9), ("b", 1.7e9), ("c", 1.5e9)):
        save(tmp_path, name, time)
    save_rows(tmp_path, "c")
    found = evaluations.evaluations(tmp_path)
    assert [one["note"].rpartition("/")[2] for one in found] == ["b.json.", "c.json.", "a.json."]
    assert found[0]["title"].startswith("data/test.jsonl, split test, 48 of 12,034 rows, final, 20")
    assert found[0]["wrong"] == [] and found[1]["wrong"][0]["row"] == "row 7"
    assert [column["name"] for column in found[0]["columns"]] == ["metric", "base", "tuned", "tuned − base", ""]
    assert found[0]["rows"][0][1:] == [
        "3.4901 [3.3625, 3.6163]", "0.0551 [0.0387, 0.0729]", "−3.4350 [−3.5633, −3.3064]", {"text": "better", "tone": "good"},
    ]  # fmt: skip
    assert found[0]["rows"][1][1:4] == ["0.0 % [0.0, 7.4]", "70.8 % [56.8, 81.8]", "+70.8 pp [+55.0, +81.8]"]
    assert found[0]["rows"][2][1:4] == ["–", "90.9 % [85.8, 95.7]", "–"]
    assert found[0]["rows"][3][0] == "arc_easy: acc"
    save(tmp_path, "file", 2e9, data={"path": "data/test.jsonl", "split": None, "rows": 48, "of_rows": 48})
    assert evaluations.evaluations(tmp_path)[0]["title"].startswith("data/test.jsonl, 48 rows, final")
    assert "cut off at 65 tokens" in found[0]["note"] and "Left out: json" in found[0]["note"]


def test_weights_are_named_by_their_step_and_final_is_the_final_of_today(tmp_path: Path) -> None:
    save(tmp_path, "then", 1e9, step=8)
    save(tmp_path, "now", 2e9, step=18)
    (tmp_path / "final").mkdir()
    write_source(tmp_path / "final", FinalSource(18))
    now, then = (one["title"] for one in evaluations.evaluations(tmp_path))
    assert ", step 18 (final), 20" in now and ", step 8, 20" in then


def test_rows_that_were_not_used_whole_are_counted(tmp_path: Path) -> None:
    data = {"path": "x.jsonl", "rows": 48, "of_rows": 48, "skipped_errors": 1, "dropped_long": 0, "cut": 3}
    save(tmp_path, "a", 1e9, data=data)
    note = evaluations.evaluations(tmp_path)[0]["note"]
    assert "1 row unreadable and skipped. 3 rows truncated to max_length." in note and "dropped" not in note


def test_a_side_alone_has_no_difference(tmp_path: Path) -> None:
    save(tmp_path, "a", 1e9, sides=["tuned"])
    (found,) = evaluations.evaluations(tmp_path)
    assert [column["name"] for column in found["columns"]] == ["metric", "tuned"] and len(found["rows"][0]) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"schema": "x"}',
        '{"schema": 1, "metrics": 3, "tasks": [4], "data": [], "time": "nan"}',
    ],
)
def test_other_files_break_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "odd.json").write_text(content)
    (tmp_path / "evaluations" / "link.json").symlink_to("/etc/passwd")
    save(tmp_path, "good", 1e9)
    assert any("data/test.jsonl" in one["title"] for one in evaluations.evaluations(tmp_path))


def test_a_result_of_a_newer_version_says_so(tmp_path: Path) -> None:
    save(tmp_path, "later", 1e9, schema=2)
    assert "newer version" in evaluations.evaluations(tmp_path)[0]["note"]


def test_a_run_without_evaluations_has_none(tmp_path: Path) -> None:
    assert evaluations.evaluations(tmp_path) == []
    assert evaluations.FOLDER == result.FOLDER


@pytest.mark.parametrize(
    ("value", "kind", "signed", "text"),
    [
        ((69.644, 68.7, 70.6), "number", False, "69.64 [68.70, 70.60]"), ((-0.00001, -1, 1), "number", True, "0.0000 [−1.0000, +1.0000]"),
        ((2.3434, 2.1, 2.5), "number", False, "2.3434 [2.1000, 2.5000]"),
        ((-9.3581, -11.0827, -7.6275), "number", True, "−9.36 [−11.08, −7.63]"),
        ((1e30,), "number", False, "1e+30"), ((float("nan"),), "share", False, "nan %"), ((None,), "share", False, "–"),
    ],
)  # fmt: skip
def test_numbers_have_their_unit_and_sign(value: Any, kind: str, signed: bool, text: str) -> None:
    assert with_interval(estimate(*value), kind, signed=signed) == text


def test_the_dashboard_notices_a_new_evaluation(tmp_path: Path) -> None:
    run = showcase(tmp_path / "one", ranks=1)
    api = RunsApi(tmp_path, clock=lambda: run.now)
    first = api.run("one", None)
    assert first is not None and first["evaluations"] == []
    assert api.run("one", first["cursor"]) == {"cursor": first["cursor"], "unchanged": True}
    save(run.folder, "a", 1e9)
    second = api.run("one", first["cursor"])
    assert second is not None and len(second["evaluations"]) == 1


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_the_page_shows_them(visit: Callable[..., Visit], tmp_path: Path, width: int, scheme: str) -> None:
    run = showcase(tmp_path / "one", ranks=1)
    save(run.folder, "a", 1.7e9)
    save_rows(run.folder, "a")
    history = RunHistory(run.folder)
    history.update()
    write_page(run_view(history, run.now), tmp_path / "one.html")
    at = visit(width=width, scheme=scheme)
    page = at.open((tmp_path / "one.html").as_uri())
    section = page.locator("#evaluations")
    assert "−3.4350 [−3.5633, −3.3064]" in section.inner_text() and "unclear" in section.inner_text()
    section.locator("summary").click()
    assert "<b>those</b>" in section.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("nav a[href='#evaluations']").count() == 1
