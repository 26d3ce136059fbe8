"""How is it told? `table.py speed.json` prints the bars; `--page` and `--readme` write its tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import LABELS, ROWS, Bar, Measurements, Row, Verdict, verdicts

BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
# Rows of the README, and what they are compared with there: `--page` has all of them.
SHORT = (
    ("dense", "stock-dense"), ("dense", "unsloth-dense"), ("short", "stock-dense-packing"), ("moe8", "stock-moe8"),
    ("moe8-experts", "stock-moe8-experts"), ("moe36", None),
)  # fmt: skip
LIBRARIES = ("torch", "triton", "transformers", "trl", "peft", "liger_kernel", "unsloth")


def text_table(told: Mapping[str, Any]) -> str:
    """Every bar with its ratio and whether it was reached, of the rows whose own case was asked for."""
    head = ("case", "ours tok/s", "GiB", "against", "tok/s", "GiB", "", "bar", "stretch", "verdict")
    lines = [head]
    for verdict in verdicts(tuple(row for row in ROWS if row.ours in told["measurements"]), told["measurements"]):
        bar, measured = verdict.bar, told["measurements"]
        own, other = measured.get(verdict.row.ours, {}), measured.get(bar.against, {}) if bar.against else {}
        lines.append((
            verdict.row.ours, _count(own, "tokens_per_second"), _gib(own), bar.against or "–",
            _count(other, "tokens_per_second"), _gib(other), _value(verdict), _wanted(bar, bar.bar),
            _wanted(bar, bar.stretch), verdict.word,
        ))  # fmt: skip
    return "\n".join([about_line(told["about"]), *_aligned(lines), counted_line(told)])


def markdown_table(told: Mapping[str, Any]) -> str:
    """What a reader of the README wants to know: our number, whose it is compared with, and the ratio."""
    lines = ["| | tok/s | peak GiB | compared with | tok/s | peak GiB | ratio |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        lines += _markdown_rows(row, told["measurements"])
    return "\n".join([*lines, "", about_line(told["about"]), "", counted_line(told)])


def short_table(full: str) -> str:
    """Some rows of the whole table, without the numbers of what they are compared with."""
    titles = {row.name: row.title for row in ROWS}
    wanted = [(titles[name], LABELS[against] if against else "–") for name, against in SHORT]
    lines, title, above = ["| | tok/s | peak GiB | compared with | ratio |", "|---|---:|---:|---|---:|"], "", ""
    own: list[str] = []
    for line in full.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7:
            title, own = (cells[0], cells[:3]) if cells[0] else (title, own)
            if (title, cells[3]) in wanted:
                first = own if title != above else ["", "", ""]
                lines.append("| " + " | ".join([*first, cells[3], cells[6]]) + " |")
                above = title
    return "\n".join(lines)


def table_of(page: Path) -> str:
    """What stands between the markers of a page."""
    return page.read_text().split(BEGIN)[1].split(END)[0].strip("\n")


def _markdown_rows(row: Row, measured: Measurements) -> list[str]:
    own = measured.get(row.ours, {})
    first = [row.title, _said(own), _gib(own)]
    others: dict[str | None, None] = dict.fromkeys(bar.against for bar in row.bars if bar.against is not None)
    lines = []
    for name in others or (None,):
        other = measured.get(name, {}) if name is not None else {}
        theirs = [LABELS[name], _said(other), _gib(other)] if name is not None else ["–", "", ""]
        lines.append("| " + " | ".join([*first, *theirs, _ratios(row, name, measured)]) + " |")
        first = ["", "", ""]
    return lines


def _ratios(row: Row, name: str | None, measured: Measurements) -> str:
    """Speed always; memory where the row is about it."""
    kinds: list[tuple[Bar, str]] = [(Bar("speed", name), "{:.2f}×")] if name is not None else []
    if name is not None and any(bar.measure == "peak" and bar.against == name for bar in row.bars):
        kinds.append((Bar("peak", name), "{:.2f}× memory"))
    asked = (Row(row.name, row.title, row.ours, tuple(bar for bar, _ in kinds)),)
    found = zip(verdicts(asked, measured), kinds, strict=True)
    return ", ".join(form.format(verdict.value) for verdict, (_, form) in found if verdict.value is not None)


def about_line(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in LIBRARIES if about["versions"].get(name))
    toys = "TOYS on a CPU, good for nothing but testing this table. " if about.get("tiny") else ""
    return f"{toys}{about['chip']}; {versions}; {about['date']}, commit {about['commit']}."


def counted_line(told: Mapping[str, Any]) -> str:
    steps = [m["steps_counted"] for m in told["measurements"].values() if m.get("steps_counted")]
    span = f"{min(steps)}–{max(steps)}" if steps and min(steps) != max(steps) else f"{steps[0] if steps else 0}"
    window = told["about"]["pace"]["window"]
    return (
        f"Tokens a second: real tokens (no padding) over wall time, the median of windows of {window} optimizer steps "
        f"after warm-up ({span} steps counted); weights and tokens are random, adapters have rank 16 (4 on the routed "
        "experts of all 36 layers). Ours through `shardtune train`; all one after the other on one machine. Peak: the "
        "most bytes in tensors."
    )


def write_into(page: Path, table: str) -> None:
    """Put the table between the markers of a page.

    Raises:
        SystemExit: the page has no such markers, or not one pair in that order.
    """
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        sys.exit(f"{page} has no place for the table: it needs the lines {BEGIN} and {END}, once and in this order.")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


def _said(found: Mapping[str, Any]) -> str:
    return _count(found, "tokens_per_second") if "tokens_per_second" in found else _why(found)


def _why(found: Mapping[str, Any]) -> str:
    return f"not measured: {found['why']}" if found.get("why") else "not measured"


def _count(found: Mapping[str, Any], key: str) -> str:
    return f"{found[key]:,.0f}" if found.get(key) is not None else "–"


def _gib(found: Mapping[str, Any]) -> str:
    return f"{found['peak_gib']:.1f}" if found.get("peak_gib") is not None else "–"


def _value(verdict: Verdict) -> str:
    if verdict.value is None:
        return "–"
    what = "" if verdict.bar.measure == "speed" else " GiB"
    return f"{verdict.value:.2f}×{what}" if verdict.bar.against else f"{verdict.value:,.1f}{what or ' tok/s'}"


def _wanted(bar: Bar, number: float | None) -> str:
    if number is None:
        return ""
    if number == 0:
        return "runs"
    return f"{'≥' if bar.measure == 'speed' else '≤'} {number:,g}{'×' if bar.against else ''}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="speed.json, as speed.py writes it")
    parser.add_argument("--page", type=Path, help=f"for the whole table, between {BEGIN} and {END}")
    parser.add_argument("--readme", type=Path, help="for the short one, between the same")
    asked = parser.parse_args()
    told = json.loads(asked.results.read_text())
    print(text_table(told))
    full = markdown_table(told)
    for page, written in ((asked.page, full), (asked.readme, short_table(full))):
        if page is not None:
            if told["about"].get("tiny"):
                sys.exit("These are toys on a CPU; they are not written into a page.")
            write_into(page, written)


if __name__ == "__main__":
    main()
