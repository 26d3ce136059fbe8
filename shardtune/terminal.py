"""How is a line written for people? Labels, numbers with units, and lines that fit a terminal."""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

VERBOSE_VARIABLE = "SHARDTUNE_VERBOSE"  # set by -v, for the ranks that a launcher starts
_INDENT = 10  # columns of a label and the space behind it
_LABELLED = re.compile(r" *(error|why|fix|more): ")


class EventWriter(Protocol):
    """What keeps a warning for reports: `observe.events.EventLog`, which this module must not import."""

    def write(self, event: str, **fields: object) -> None: ...


def wrapped(text: str, width: int | None, indent: int = 0) -> str:
    """`text` in lines of at most `width` columns, all but the first of each indented by `indent` more than it is.

    A word that is longer than a line stays whole: a terminal wraps it, and it can still be copied.

    Args:
        width: None breaks nothing: a log is searched by lines.
    """
    if width is None:
        return text
    return "\n".join(_wrapped_line(line, width, indent) for line in text.split("\n"))


def _wrapped_line(line: str, width: int, indent: int) -> str:
    if len(line) <= width:
        return line
    labelled = _LABELLED.match(line)
    own = labelled.end() if labelled else len(line) - len(line.lstrip()) + indent
    lines = textwrap.wrap(
        line, width, subsequent_indent=" " * own, break_long_words=False, break_on_hyphens=False, tabsize=4
    )
    return "\n".join(lines)


def width_of(console: Console) -> int | None:
    """Columns of a terminal; None where there is none."""
    return console.width if console.is_terminal else None


def fitted(text: str, stream: IO[str]) -> str:
    """`text` as it is printed to `stream`: wrapped on a terminal; in a log, and of a traceback, nothing is changed."""
    if "Traceback (most recent call last)" in text:
        return text
    try:
        width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else None
    except (OSError, ValueError):  # a stream that was closed, or has no descriptor
        width = None
    return wrapped(text, width or None, 2)


def say(console: Console, label: str, text: str, style: str = "bold") -> None:
    """One labelled line: wrapped between words on a terminal, whole elsewhere, so that logs can be searched."""
    from rich.text import Text

    line = wrapped(f"{label:<{_INDENT - 1}} {text}", width_of(console), _INDENT)
    console.print(Text.assemble((line[: len(label)], style), line[len(label) :]), soft_wrap=True)


def detail(console: Console, label: str, text: str) -> None:
    """A line for those who asked for everything (`-v`)."""
    if is_verbose():
        say(console, label, text)


def is_verbose() -> bool:
    return bool(os.environ.get(VERBOSE_VARIABLE))


def warn(console: Console, events: EventWriter, about: str, text: str) -> None:
    """Printed in red, and written to the events, where reports find it."""
    say(console, "warning", text, "bold red")
    events.write("warning", about=about, text=text)


def percent(share: float) -> str:
    """`78.9 %`; a share that is not zero never reads as zero."""
    return f"{share:.1%}".replace("%", " %") if share >= 0.0005 or not share else f"{100 * share:.1g} %"


def count(number: int, word: str, plural: str = "s") -> str:
    """`1 process`, `2 processes`."""
    return f"{number:,} {word}{'' if number == 1 else plural}"


def operations(tflops: float) -> str:
    """`310 TFLOP/s`; a toy on a CPU does `66.6 MFLOP/s`."""
    for unit in ("TFLOP/s", "GFLOP/s", "MFLOP/s"):
        if tflops >= 0.1 or unit == "MFLOP/s":
            break
        tflops *= 1000
    return f"{tflops:.3g} {unit}"


def size(number: float) -> str:
    """Bytes in powers of 1024, as memory is counted: 13207024435 → `12.3 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 999.5:  # three digits of more would read 1e+03
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def duration(seconds: float) -> str:
    """`812 ms`, `1.24 s`; a longer one as `clock` says it."""
    if seconds >= 100:
        return clock(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def clock(seconds: float) -> str:
    """12 s → `0:12`, 3700 s → `1:01:40`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
