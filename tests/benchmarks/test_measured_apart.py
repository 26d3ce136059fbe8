"""A measurement leaves nothing behind: no process of it, and no memory of the device, whatever ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from apart import members, run_apart, wait_for_memory

# Starts a worker in a process group of its own, as our launcher does; both ignore a polite request.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], process_group=0)
open(sys.argv[1], "w").write(str(child.pid))
{then}
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = STUBBORN.format(then="time.sleep(120)").replace("signal.SIG_IGN", "signal.SIG_DFL")
    ended = run_apart([sys.executable, "-c", code, str(told)], tmp_path / "log", 3.0, os.environ)
    assert ended.code is None and ended.seconds >= 3.0
    assert not is_alive(int(told.read_text()))


def test_what_does_not_heed_the_request_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("apart._FAREWELL", 0.2)
    told = tmp_path / "pid"
    code = STUBBORN.format(then="time.sleep(120)")
    ended = run_apart([sys.executable, "-c", code, str(told)], tmp_path / "log", 3.0, os.environ)
    assert ended.code is None
    assert not is_alive(int(told.read_text()))


def test_a_process_that_ends_by_itself_leaves_no_worker_behind(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = STUBBORN.format(then="print('words'); sys.exit(3)")
    ended = run_apart([sys.executable, "-c", code, str(told)], tmp_path / "log", 60.0, os.environ)
    assert ended.code == 3 and (tmp_path / "log").read_text() == "words\n"
    assert not is_alive(int(told.read_text()))


def test_a_harness_that_is_ended_ends_what_it_measures(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(sys.modules["apart"].__file__).parent)!r})
from apart import run_apart
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
run_apart([sys.executable, "-c", {STUBBORN.format(then="time.sleep(120)").replace("signal.SIG_IGN", "signal.SIG_DFL")!r},
           {str(tmp_path / "pid")!r}], Path({str(tmp_path / "log")!r}), 100.0, os.environ)
"""
    harness = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    harness.send_signal(signal.SIGTERM)
    assert harness.wait(timeout=60) == 143
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_only_the_processes_of_a_session_are_its_members() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert members(process.pid) == [process.pid]
    process.communicate(b"\n")
    assert members(process.pid) == []


def test_the_next_measurement_waits_until_the_memory_is_free_again() -> None:
    readings = [40 * 2**30, 3 * 2**30, 2**30]
    assert wait_for_memory(lambda: readings.pop(0), before=2**30)
    assert readings == []
    assert not wait_for_memory(lambda: 2**40, before=2**30, patience=0.3)
    assert wait_for_memory(lambda: None, before=None)
