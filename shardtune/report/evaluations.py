"""How good is the model on given data? The results of `shardtune eval` in a run's folder, as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtune.checkpoint.final import FINAL, read_source
from shardtune.durable import open_plain
from shardtune.report import formatting
from shardtune.report.read import listed, mapping, number, read_json, text, whole
from shardtune.report.tables import Cell, table

FOLDER = "evaluations"
_SCHEMA = 1
_MOST = 20  # evaluations on a page, the newest first
_MOST_SCORES = 200
_MOST_WRONG = 4
_ROWS_BYTES = 1 << 20
_SIDES = ("base", "tuned")
_PREPARATION = {
    "skipped_errors": "unreadable and skipped",
    "dropped_long": "too long and dropped",
    "cut": "truncated to max_length",
}
_TONES = {"better": "good", "worse": "bad"}


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The newest first; a file that is not a result is passed over, and one of a newer version is named."""
    try:
        files = [path for path in (run / FOLDER).glob("*.json") if not path.name.startswith(".")]
    except OSError:
        return []
    read = [(path, read_json(path)) for path in files]
    found = [(path, result) for path, result in read if whole(result.get("schema"))]
    found.sort(key=lambda pair: number(pair[1].get("time")) or 0.0, reverse=True)
    final = read_source(run / FINAL)
    shown = [{**_shown(path, result, final.step if final else None), "wrong": []} for path, result in found[:_MOST]]
    for evaluation, (path, _) in zip(shown, found, strict=False):
        evaluation["wrong"] = _wrong(path)
        if evaluation["wrong"]:  # of the newest that has any
            break
    return shown


def _shown(path: Path, result: dict[str, Any], final_step: int | None) -> dict[str, Any]:
    if whole(result.get("schema")) != _SCHEMA:
        note = "Written by a newer version of shardtune, which this one cannot read."
        return {"title": formatting.plain(path.stem, 200), **table([], [], note=note)}
    sides = [side for side in _SIDES if side in listed(result.get("sides"))]
    rows = [_row(mapping(one), sides, "") for one in listed(result.get("metrics"))[:_MOST_SCORES]]
    rows += [_row(mapping(one), sides, _task(mapping(one))) for one in listed(result.get("tasks"))[:_MOST_SCORES]]
    heads = ["metric", *sides, *(["tuned − base", ""] if len(sides) == 2 else [])]
    data = mapping(result.get("data"))
    notes = [
        f"{formatting.count(affected, 'row')} {what}."
        for key, what in _PREPARATION.items()
        if (affected := whole(data.get(key)))
    ]
    notes += [text(note) for note in listed(result.get("notes"))]
    notes += [
        f"Left out: {text(mapping(one).get('metric'))}, because {text(mapping(one).get('why'))}."
        for one in listed(result.get("left_out"))
    ]
    note = " ".join(["95 % intervals in brackets.", *notes, f"File: {FOLDER}/{path.name}."])
    return {
        "title": formatting.plain(_title(result, final_step), 300),
        **table(heads, rows, numbers=" nnn", note=formatting.plain(note, 2000)),
    }


def _title(result: Mapping[str, Any], final_step: int | None) -> str:
    data, parts = mapping(result.get("data")), []
    if data:
        own = "validation rows of the run" if data.get("own_validation") is True else text(data.get("path"))
        rows, of = whole(data.get("rows")) or 0, whole(data.get("of_rows")) or 0
        sampled = f"{rows:,} of {formatting.count(of, 'row')}" if rows < of else formatting.count(rows, "row")
        parts += [own, f"split {text(data['split'])}" if data.get("split") else "", sampled, *seen_in_training(data)]
    else:
        parts.append("lm-evaluation-harness")
    return ", ".join(
        filter(None, (*parts, _weights(result, final_step), formatting.when(number(result.get("time")) or -1e18)))
    )


def seen_in_training(data: Mapping[str, Any]) -> list[str]:
    """What makes the numbers say little about new rows, if anything does."""
    found = ["changed since training"] if data.get("changed_since_training") is True else []
    if seen := whole(data.get("training_rows")):
        found.append(f"{seen:,} of them also training rows")
    elif data.get("training_split") is True:
        found.append("which the run was trained on")
    return found


def _weights(result: Mapping[str, Any], final_step: int | None) -> str:
    """By their step: what `final/` was when they were evaluated may have been replaced since."""
    step = whole(result.get("step"))
    if step is None:
        return text(result.get("checkpoint"))
    return f"step {step:,}" + (" (final)" if step == final_step else "")


def _task(one: Mapping[str, Any]) -> str:
    filter_ = text(one.get("filter"))
    return text(one.get("task")) + (f" ({filter_})" if filter_ not in ("", "none") else "") + ": "


def _row(metric: Mapping[str, Any], sides: list[str], prefix: str) -> list[Cell]:
    shown = {side: mapping(metric.get(side)) for side in (*sides, "difference")}
    kind = text(metric.get("kind"))
    cells: list[Cell] = [formatting.plain(prefix + text(metric.get("title")), 120)]
    cells += [with_interval(shown[side], kind) for side in sides]
    if len(sides) == 2:
        verdict = formatting.plain(text(metric.get("verdict")), 40)
        cells.append(with_interval(shown["difference"], kind, signed=True))
        cells.append({"text": verdict, "tone": _TONES.get(verdict, "soft")})
    return cells


def with_interval(estimate: Mapping[str, Any], kind: str, between: str = " ", *, signed: bool = False) -> str:
    """`71.2 % [58.3, 81.4]`; a difference has its sign, and of shares counts percentage points.

    Args:
        estimate: With `value`, `low` and `high`, which may be unknown.
        kind: `share` or `number`; a number and its interval have as many decimals as the largest of them deserves.
        between: What stands before the interval.
    """
    value, low, high = (number(estimate.get(name)) for name in ("value", "low", "high"))
    if value is None:
        return "–"
    largest = max(abs(each) for each in (value, low, high) if each is not None)
    places = 4 if largest < 10 else 2 if largest < 1000 else 0
    unit = "" if kind != "share" else " pp" if signed else " %"
    shown = f"{_written(value, kind, places, signed)}{unit}"
    if low is None or high is None:
        return shown
    return f"{shown}{between}[{_written(low, kind, places, signed)}, {_written(high, kind, places, signed)}]"


def _written(value: float, kind: str, places: int, signed: bool) -> str:
    rounded = (
        f"{100 * value:.1f}" if kind == "share" else f"{value:,.{places}f}" if abs(value) < 1e9 else f"{value:.3g}"
    )
    rounded = rounded.removeprefix("-") if float(rounded.replace(",", "")) == 0 else rounded
    sign = "+" if signed and float(rounded.replace(",", "")) > 0 else ""
    return f"{sign}{rounded}".replace("-", "−")


def _wrong(path: Path) -> list[dict[str, str]]:
    """The first rows that the tuned model got wrong."""
    try:
        with open_plain(path.with_name(f"{path.stem}.rows.jsonl")) as file:
            lines = file.read(_ROWS_BYTES).split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = mapping(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if mapping(row.get("exact_match")).get("tuned") is False:
            found.append({"row": f"row {whole(row.get('row')) or 0:,}", **_texts(row)})
        if len(found) == _MOST_WRONG:
            break
    return found


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    names = ("prompt", "base", "tuned", "expected")
    return {name: formatting.plain(row[name], 4000) for name in names if isinstance(row.get(name), str)}
