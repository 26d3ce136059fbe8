"""How does the report read as a page? One file of HTML: no script, nothing loaded, every text of the data escaped."""

from __future__ import annotations

from datetime import datetime
from html import escape
from pathlib import Path

from shardtune import __version__
from shardtune.data.histogram import share
from shardtune.data.inspect import Report, SplitNumbers, split_facts
from shardtune.data.inspect_style import STYLE
from shardtune.data.show_rows import Piece, ShownRow, visible
from shardtune.errors import UserInputError
from shardtune.terminal import count

# Even a text that slipped through unescaped could neither run nor fetch anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_TILED = ("rows", "tokens", "length", "", "packing")  # facts that the tiles and the plot tell already


def write_page(report: Report, path: Path) -> None:
    """Write the page to `path`."""
    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise UserInputError(
            f"The page '{path}' could not be written.",
            why=error.strerror or str(error),
            fix="Pass --html a file in an existing, writable folder.",
        ) from error


def page(report: Report) -> str:
    """The whole page as text."""
    title = f"Data of {report.source}"
    body = [
        f"<h1>{_safe(report.source)}</h1>",
        f'<p class="lead">Format <b>{_safe(report.format_name)}</b>'
        + (f": {_safe(report.format_why)}" if report.format_why else "")
        + "</p>",
        _findings(report),
        *(_split(numbers, report) for numbers in report.splits),
        _rows(report),
        f"<footer>Prepared in {_safe(str(report.folder))}<br>shardtune {__version__}, "
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n</body>\n</html>\n"
    )


def _safe(text: str) -> str:
    """Escaped for text and attributes; control characters and lone surrogates are written out."""
    return escape(visible(text))


def _findings(report: Report) -> str:
    if not report.findings:
        return '<div class="finding good"><p class="what"><span class="level">No problems found.</span></p></div>'
    return "\n".join(
        f'<div class="finding {f.level}"><p class="what"><span class="level">{f.level}:</span> {_safe(f.what)}</p>'
        f'<p><span class="word">why</span> {_safe(f.why)}</p><p><span class="word">fix</span> {_safe(f.fix)}</p></div>'
        for f in report.findings
    )


def _split(numbers: SplitNumbers, report: Report) -> str:
    counts = numbers.counts
    rest = [(fact.label, fact.text) for fact in split_facts(numbers) if fact.label not in _TILED]
    if numbers.name == "val":
        rest += [(fact.label, fact.text) for fact in report.facts() if fact.label == "overlap"]
    left_out = counts.read - counts.rows
    tiles = (
        ("rows", f"{counts.rows:,}", f"from {counts.read:,} read" if left_out else "all that were read"),
        ("tokens", _short(counts.tokens), f"{counts.tokens:,} in all" if counts.tokens >= 10_000 else "in all rows"),
        ("supervised", share(counts.supervised, counts.tokens), f"{counts.supervised:,} tokens carry loss"),
        ("mean length", f"{numbers.mean:,.0f}", f"{numbers.shortest:,} to {numbers.longest:,} tokens"),
        (
            "packing",
            f"{100 * numbers.packing_efficiency:.1f} %",
            f"{count(numbers.packed_rows, 'sequence')} of {numbers.max_length:,}",
        ),
    )
    return (
        f"<h2>{_safe(numbers.title.capitalize())}</h2>\n"
        f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles)}</div>\n'
        f'<section class="card"><h3>Tokens per row</h3>{_plot(numbers)}{_scale(numbers)}</section>\n'
        f'<section class="card"><table class="facts">{"".join(_fact(*fact) for fact in rest)}</table></section>\n'
        f'<section class="card"><h3>Longest rows</h3>{_longest(numbers)}</section>'
    )


def _tile(name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><div class="name">{_safe(name)}</div><div class="value">{_safe(value)}</div>'
        f'<div class="note">{_safe(note)}</div></div>'
    )


def _fact(label: str, text: str) -> str:
    return f'<tr><th scope="row">{_safe(label)}</th><td>{_safe(text)}</td></tr>'


def _plot(numbers: SplitNumbers) -> str:
    rows, tokens = sum(b.rows for b in numbers.buckets), sum(b.tokens for b in numbers.buckets)
    most = max(b.rows for b in numbers.buckets)
    lines = []
    for bucket in numbers.buckets:
        bar = f'<div class="bar" style="width:{100 * bucket.rows / most:.2f}%"></div>' if bucket.rows else ""
        lines.append(
            f'<tr class="{"limit" if bucket.is_limit else "below"}"><td class="number">'
            + ("<small>max_length</small> " if bucket.is_limit else "")
            + f'{bucket.label}</td><td class="bar-cell"><div class="track">{bar}</div></td>'
            f'<td class="number">{bucket.rows:,}</td>'
            f'<td class="number">{_safe(share(bucket.rows, rows))}</td>'
            f'<td class="number wide">{_safe(share(bucket.tokens, tokens))}</td></tr>'
        )
    head = (
        '<tr><th class="number">tokens</th><th></th><th class="number">rows</th><th class="number">share</th>'
        '<th class="number wide">of tokens</th></tr>'
    )
    return f'<table class="plot">{head}{"".join(lines)}</table>'


def _scale(numbers: SplitNumbers) -> str:
    marks = [("shortest", numbers.shortest), *((f"p{p}", n) for p, n in numbers.percentiles.items())]
    marks.append(("longest", numbers.longest))
    return '<div class="scale">' + "".join(f"<div><span>{name}</span>{n:,}</div>" for name, n in marks) + "</div>"


def _longest(numbers: SplitNumbers) -> str:
    lines = "".join(
        f'<tr><td class="number">{row.number:,}</td><td class="number">{row.tokens:,}</td>'
        f'<td class="begin mono">{escape(row.beginning)}</td></tr>'
        for row in numbers.longest_rows
    )
    return (
        '<table class="longest"><tr><th class="number">row</th><th class="number">tokens</th><th>begins</th></tr>'
        f"{lines}</table>"
    )


def _rows(report: Report) -> str:
    if not report.rows:
        return ""
    legend = (
        '<p class="legend"><span class="item"><span class="t learnt">supervised</span> carries loss</span>'
        '<span class="item"><span class="t">not supervised</span></span>'
        '<span class="item"><span class="special">&lt;s&gt;</span> special token</span>'
        '<span class="item">⏎ newline</span> <span class="item">⇥ tab</span>'
        '<span class="item">Hover over a token for its id.</span></p>'
    )
    return f"<h2>Rows of {_safe(report.shown_of)}</h2>\n{legend}\n" + "\n".join(_row(row) for row in report.rows)


def _row(row: ShownRow) -> str:
    share_of = f", {row.supervised / row.tokens:.0%}" if row.tokens else ""
    gap = f'<span class="gap">{_safe(row.gap)}</span>' if row.left_out else ""
    return (
        f'<details class="card" open><summary>Row {row.number:,} '
        f"<span>{row.tokens:,} tokens, {row.supervised:,} supervised{share_of}</span></summary>"
        f'<div class="row-text">{"".join(map(_token, row.head))}{gap}{"".join(map(_token, row.tail))}</div></details>'
    )


def _token(piece: Piece) -> str:
    kinds = ["t", *(["learnt"] if piece.supervised else []), *(["special"] if piece.named else [])]
    numbers = " ".join(map(str, piece.ids))
    text = _safe(piece.text).replace("⏎", '<span class="sign">⏎</span>').replace("⇥", '<span class="sign">⇥</span>\t')
    title = f"token {numbers}{', supervised' if piece.supervised else ''}"
    return f'<span class="{" ".join(kinds)}" title="{title}">{text}</span>'


def _short(number: float) -> str:
    """3,214,554 → `3.21 M`."""
    if number < 10_000:
        return f"{number:,}"
    for unit in ("k", "M", "B"):
        number /= 1000
        if number < 999.5:  # three digits of more would read 1e+03
            return f"{number:.3g} {unit}"
    return f"{number / 1000:,.3g} T"
