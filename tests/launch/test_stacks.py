"""A process that does not answer is asked where it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardtune.launch.stacks import ask

CHILD = """
    import json, sys, threading, time
    from pathlib import Path
    from shardtune.launch.stacks import answering

    def busy():  # its frames come and go all the time: reading them from another thread may end the process
        while True:
            json.dumps({"a": [1, 2, 3]}, indent=1)

    def hangs_here():
        print("hangs", flush=True)
        while True:
            time.sleep(0.02)

    def waits():
        threading.Event().wait()

    threading.Thread(target=busy if sys.argv[2] == "beside a busy thread" else waits, daemon=True).start()
    if sys.argv[2] != "without answering":
        with answering(Path(sys.argv[1]), 3):
            hangs_here()
    hangs_here()
"""


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> int:
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stopped", [True, False])
def test_the_main_thread_s_stack_comes_whole_whatever_the_other_threads_do(hang, tmp_path: Path, stopped: bool) -> None:
    for _ in range(4):
        pid = hang("beside a busy thread")
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        stack = ask(pid, tmp_path, 3).partition("All threads")[0]
        assert "in hangs_here" in stack
        assert "in busy" not in stack, "another thread answered"
        assert stack.rstrip().endswith("in <module>")


def test_the_other_threads_are_asked_too(hang, tmp_path: Path) -> None:
    _, said, others = ask(hang("beside a waiting thread"), tmp_path, 3).partition("All threads")
    assert said
    assert "in waits" in others
    assert "in hangs_here" in others


def test_a_process_that_has_not_begun_to_answer_is_not_asked(hang, tmp_path: Path) -> None:
    pid = hang("without answering")
    assert ask(pid, tmp_path, 3) == ""
    os.kill(pid, 0)  # and the signals, which would have ended it, were not sent
