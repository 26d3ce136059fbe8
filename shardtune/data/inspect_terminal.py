"""How does the report read on a terminal? Labelled lines, a plot of the lengths, and rows with their marks."""

from __future__ import annotations

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from shardtune.data.checks import Finding
from shardtune.data.histogram import histogram_lines
from shardtune.data.inspect import Report, SplitNumbers, split_facts
from shardtune.data.show_rows import ShownRow, as_text, legend
from shardtune.terminal import say

_WIDEST = 120  # columns of the plot


def print_report(console: Console, report: Report) -> None:
    for fact in report.facts():
        say(console, fact.label, fact.text)
    for numbers in report.splits:
        _print_split(console, numbers)
    if report.rows:
        print_rows(console, report.rows, report.shown_of)
    print_findings(console, report.findings)  # last, where the eye is when the prompt comes back
    if not report.findings:
        console.print(Text.assemble(("\nok", "bold green"), ": no problems found in the data."))


def print_findings(console: Console, findings: tuple[Finding, ...] | list[Finding]) -> None:
    for finding in findings:
        colour = "red" if finding.level == "error" else "yellow"
        line = Text.assemble((f"\n{finding.level}", f"bold {colour}"), f": {finding.what}")
        console.print(line, soft_wrap=True)
        for word, text in (("why", finding.why), ("fix", finding.fix)):
            console.print(Text.assemble((f"  {word}: ", "dim"), text), soft_wrap=True)


def _print_split(console: Console, numbers: SplitNumbers) -> None:
    _print_heading(console, numbers.title)
    for fact in split_facts(numbers):
        say(console, fact.label, fact.text)
    console.print()
    for index, line in enumerate(histogram_lines(numbers.buckets, min(console.width, _WIDEST))):
        plotted = Text(line.rstrip(), style="dim" if index == 0 else "")
        plotted.highlight_regex(r"[█-▏]+", "yellow" if "◀" in line else "blue")
        plotted.highlight_regex(r"◀.*", "yellow")
        console.print(plotted, soft_wrap=True)
    console.print()
    width = max(len(f"{row.number:,}") for row in numbers.longest_rows)
    console.print(Text("longest rows", style="bold"))
    for row in numbers.longest_rows:
        line = f"  row {row.number:>{width},}  {row.tokens:>{len(f'{numbers.longest:,}')},} tokens  {row.beginning}"
        console.print(Text(line), no_wrap=True, overflow="ellipsis", crop=True)


def print_rows(console: Console, rows: tuple[ShownRow, ...], split: str) -> None:
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    _print_heading(console, f"rows of {split}")
    console.print(legend(colour=colour), soft_wrap=True)
    for row in rows:
        console.print()
        console.print(Text(row.title, style="bold"), soft_wrap=True)
        console.print(as_text(row, colour=colour), soft_wrap=True)


def _print_heading(console: Console, words: str) -> None:
    console.print()
    if console.is_terminal:
        console.print(Rule(Text(words, style="bold"), align="left", style="dim"))
    else:
        console.print(Text(f"== {words} =="))
