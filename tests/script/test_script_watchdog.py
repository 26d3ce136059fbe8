"""When does a script hang? Steps have a deadline; elsewhere only a rank that is idle or waits for others has one."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from shardtune.script import watchdog as module
from shardtune.script.watchdog import ScriptLimits, ScriptWatchdog


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW", 0.0)


def watched(**given: bool) -> ScriptWatchdog:
    """One that is never started: its looks are made by hand."""
    return ScriptWatchdog(0, ScriptLimits(load=100, step=10, **given))


def look_after(watchdog: ScriptWatchdog, cpu: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a look, after a second with so much CPU time, counts as progress."""
    now = time.monotonic()
    watchdog._since, watchdog._cpu = now - 5, (now - 1, 0.0)
    monkeypatch.setattr(module, "_cpu_seconds", lambda: cpu)
    watchdog.look()
    return watchdog._since > now - 1


def test_a_busy_script_that_says_nothing_gets_on_and_an_idle_one_does_not(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look_after(watched(), 0.9, monkeypatch)
    assert not look_after(watched(), 0.001, monkeypatch)


def test_a_rank_that_waits_for_others_does_not_get_on_however_busy(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "waits_for_others", lambda stack: True)
    assert not look_after(watched(), 0.9, monkeypatch)


def test_where_steps_are_known_or_the_limit_is_set_nothing_else_counts(
    fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not look_after(watched(load_is_given=True), 0.9, monkeypatch)
    in_step = watched()
    in_step.in_step = True
    assert not look_after(in_step, 0.9, monkeypatch)


def test_the_limit_of_loading_holds_until_the_first_step(fast: None) -> None:
    watchdog = watched()
    assert watchdog.limit == 100 and "no step yet" in watchdog.limit_named
    watchdog.enter("computing a step", 1)
    assert watchdog.limit == 10 and watchdog.limit_named == " (parallel.step_timeout_minutes)"


def test_the_steps_of_torchs_optimizers_are_progress_without_a_word_of_the_script() -> None:
    import torch

    watchdog = watched(load_is_given=True)
    watchdog.look()
    watchdog._since -= 50
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    before = watchdog._since
    optimizer.step()
    assert watchdog._since > before and watchdog.limit == 10 and "(step 1)" in watchdog.doing


_BUSY_CHILDREN = """
import subprocess, sys
from shardtune.script.watchdog import _cpu_seconds

busy = "import time\\nwhile time.process_time() < 0.3: pass"
before = _cpu_seconds()
subprocess.run([sys.executable, "-c", busy], check=True)
print(_cpu_seconds() - before)
"""


def test_cpu_time_of_the_process_group_is_counted_also_of_children_that_have_ended() -> None:
    alone = {"start_new_session": True}  # the group of these tests has others, which end meanwhile
    done = subprocess.run([sys.executable, "-c", _BUSY_CHILDREN], capture_output=True, text=True, check=True, **alone)
    assert 0.2 <= float(done.stdout) < 30  # of 0.3, in ticks of 10 ms
