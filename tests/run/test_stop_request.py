from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from shardtune.run.stop_request import Grace, StopRequest, grace_seconds, known_grace


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_before_there_is_anything_to_save_a_signal_ends_the_work_at_once(number: int, code: int) -> None:
    with pytest.raises(SystemExit) as caught, StopRequest():
        signal.raise_signal(number)
    assert caught.value.code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_once_training_has_begun_a_signal_is_only_remembered(number: int) -> None:
    with StopRequest() as stop:
        stop.wait_for_step()
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested and stop.signal == number


def test_a_signal_that_was_swallowed_is_not_lost() -> None:
    with StopRequest() as stop:
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            stop.wait_for_step()


def test_the_former_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with StopRequest():
        assert signal.getsignal(signal.SIGUSR1) != before[signal.SIGUSR1]
    assert {number: signal.getsignal(number) for number in before} == before


SCRIPT = """
import os, signal, sys
from types import SimpleNamespace
from shardtune.run import stop_request
clock = [0.0]
stop_request.time = SimpleNamespace(monotonic=lambda: clock[0])
with stop_request.StopRequest() as stop:
    stop.wait_for_step()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # the same press, handed on twice
    clock[0] = 2 * stop_request._SAME_PRESS
    print("still here", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("never", flush=True)
"""


def test_a_second_signal_leaves_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout) == (143, "still here\n"), done.stderr


def test_the_grace_comes_from_the_config_or_the_scheduler_or_is_the_usual_one() -> None:
    assert grace_seconds(12, {"SHARDTUNE_GRACE_SECONDS": "600"}) == 12
    assert grace_seconds(None, {"SHARDTUNE_GRACE_SECONDS": "600"}) == 600
    assert grace_seconds(None, {}) == grace_seconds(None, {"SHARDTUNE_GRACE_SECONDS": "soon"}) == 30


def test_without_a_scheduler_nobody_is_warned_of_its_grace() -> None:
    assert known_grace(None, {}) is None and Grace(None).check(100.0, 100.0) is None
    assert known_grace(12, {}) == 12 and known_grace(None, {"SHARDTUNE_GRACE_SECONDS": "600"}) == 600
    for scheduler in ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"SLURM_JOB_ID": "7"}):
        assert known_grace(None, scheduler) == 30


def test_a_grace_that_is_too_short_is_told_once() -> None:
    grace = Grace(30)
    assert grace.check(0.0, 0.0) is None
    assert grace.check(20.0, 5.0) is None
    text = grace.check(1.0, 15.0)
    assert text is not None and "up to 35 s" in text and "train.grace_seconds" in text
    assert grace.check(1.0, 15.0) is None
