"""A process that does not answer is asked where it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from shardtune.run.channel import Channel
from shardtune.run.stacks import dump_stacks

CHILD = """
    import json, sys, threading, time
    import os
    from shardtune.run.channel import Channel
    from shardtune.run.stacks import stack_dump_handlers

    def busy():  # its frames come and go all the time: reading them from another thread may end the process
        while True:
            json.dumps({"a": [1, 2, 3]}, indent=1)

    def hangs_here():
        print("hangs", flush=True)
        while True:
            time.sleep(0.02)

    def waits():
        threading.Event().wait()

    threading.Thread(target=busy if sys.argv[1] == "beside a busy thread" else waits, daemon=True).start()
    if sys.argv[1] != "without answering":
        with stack_dump_handlers(Channel.inherited(os.environ)):
            hangs_here()
    hangs_here()
"""


@pytest.fixture
def hang() -> Iterator[object]:
    started: list[tuple[subprocess.Popen[str], Channel]] = []

    def start(how: str) -> tuple[int, Channel]:
        channel = Channel.create()
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), how], stdout=subprocess.PIPE, text=True,
            pass_fds=channel.files, env={**os.environ, **channel.environment()},
        )  # fmt: skip
        started.append((process, channel))
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        return process.pid, channel

    yield start
    for process, channel in started:
        process.kill()
        process.communicate()
        channel.close()


@pytest.mark.parametrize("stopped", [True, False])
def test_the_main_thread_s_stack_comes_whole_whatever_the_other_threads_do(hang, stopped: bool) -> None:
    for _ in range(2):
        pid, channel = hang("beside a busy thread")
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        stack = dump_stacks(pid, channel).partition("All threads")[0]
        assert "in hangs_here" in stack
        assert "in busy" not in stack, "another thread answered"
        assert stack.rstrip().endswith("in <module>")


def test_the_other_threads_are_asked_too(hang) -> None:
    _, said, others = dump_stacks(*hang("beside a waiting thread")).partition("All threads")
    assert said
    assert "in waits" in others
    assert "in hangs_here" in others


def test_a_process_that_has_not_begun_to_answer_is_not_asked(hang) -> None:
    pid, channel = hang("without answering")
    assert dump_stacks(pid, channel) == ""
    os.kill(pid, 0)  # and the signals, which would have ended it, were not sent
