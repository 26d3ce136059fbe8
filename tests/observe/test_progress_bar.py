"""A bar for those who watch, nothing for a log file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardtune.observe.progress_bar import Bar, LoadingProgress


def on_terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=100), out


def test_a_terminal_sees_what_is_done_and_how_far() -> None:
    console, out = on_terminal()
    with Bar(console) as bar:
        assert bar.is_live
        bar.show("first", 1, 2, "half of it")
        bar.show("second")
        bar.show("second", 3, 4, "three of four")
    assert "first" in out.getvalue()
    assert "three of four" in out.getvalue()
    assert not bar.is_live


@pytest.mark.parametrize(
    "console", [Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True, quiet=True)]
)
def test_elsewhere_nothing_is_written(console: Console) -> None:
    with Bar(console) as bar:
        assert not bar.is_live
        bar.show("anything", 1, 2, "numbers")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_the_bar_of_the_weights_says_bytes_and_speed() -> None:
    console, out = on_terminal()
    with LoadingProgress(console) as progress:
        progress(3 << 29, 4 << 30)
    assert "1.5 GiB of 4 GiB" in out.getvalue()
    assert "B/s" in out.getvalue()


def test_the_bar_ends_when_loading_fails() -> None:
    console, _ = on_terminal()
    progress = LoadingProgress(console)
    with pytest.raises(RuntimeError), progress:
        progress(1, 2)
        raise RuntimeError
    assert not progress.is_live
