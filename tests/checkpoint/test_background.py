"""One save in flight, its outcome told once, to the thread that trains."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shardtune.checkpoint.background import BackgroundWriter


def test_a_job_runs_beside_the_caller_and_its_outcome_is_given_once() -> None:
    writer, go = BackgroundWriter(), threading.Event()
    writer.start(7, lambda: Path("a") if go.wait(30) else Path("late"))
    assert writer.take() is None  # still running
    go.set()
    writer.wait()
    outcome = writer.take()
    assert outcome is not None and (outcome.step, outcome.path, outcome.error) == (7, Path("a"), None)
    assert writer.take() is None


def test_the_next_job_waits_for_the_one_before() -> None:
    writer, order = BackgroundWriter(), list[str]()
    go = threading.Event()

    def first() -> Path:
        go.wait(30)
        order.append("first")
        return Path("first")

    writer.start(1, first)
    threading.Timer(0.05, go.set).start()
    writer.wait()
    assert writer.take() is not None
    writer.run(2, lambda: Path(order.append("second") or "second"))
    assert order == ["first", "second"]
    outcome = writer.take()
    assert outcome is not None and outcome.background_seconds == 0.0


def test_an_error_of_the_disk_is_an_outcome_and_any_other_is_raised_where_it_is_taken() -> None:
    def full() -> Path:
        raise OSError(28, "No space left on device")

    def wrong() -> Path:
        raise KeyError("ours")

    writer = BackgroundWriter()
    writer.start(1, full)
    writer.wait()
    outcome = writer.take()
    assert outcome is not None and outcome.path is None and "No space" in str(outcome.error)
    writer.start(2, wrong)
    writer.wait()
    with pytest.raises(KeyError, match="ours"):
        writer.take()
    assert writer.take() is None
