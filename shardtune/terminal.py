"""How does a long line fit a terminal? Broken between words; a path or a number is never broken."""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_LABELLED = re.compile(r" *(error|why|fix): ")


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
