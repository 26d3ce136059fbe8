"""What happens between the command and the first process that trains."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from toys import toy_config

from shardtune.launch import start as module


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("moment", ["load_config", "_banner", "choose_run"])
def test_a_signal_before_anything_is_started_ends_with_the_code_of_a_stop(
    tmp_path: Path, toy_model: Path, toy_data: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], moment: str, number: signal.Signals, code: int,
) -> None:  # fmt: skip
    """A scheduler that takes a job back while it starts must see that it wants to be started again."""
    real = getattr(module, moment)

    def interrupted(*args: object, **more: object) -> object:
        done = real(*args, **more)
        signal.raise_signal(number)
        return done

    monkeypatch.setattr(module, moment, interrupted)
    monkeypatch.setattr(module, "_work", lambda *_: pytest.fail("training began"))
    before = signal.getsignal(number)
    config = toy_config(tmp_path, toy_model, toy_data)
    assert module.start(config, [], None, "r", dict(os.environ)) == code
    assert "Stopped before the first step; there is nothing to save." in capsys.readouterr().out
    assert signal.getsignal(number) == before


def test_a_signal_that_was_swallowed_is_not_lost(
    tmp_path: Path, toy_model: Path, toy_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallows(*_: object) -> str:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            return "banner"
        return "no signal"

    monkeypatch.setattr(module, "_banner", swallows)
    monkeypatch.setattr(module, "_work", lambda *_: pytest.fail("training began"))
    assert module.start(toy_config(tmp_path, toy_model, toy_data), [], None, "r", dict(os.environ)) == 75
