"""What a rank writes, its launcher reads whole or not at all, whatever happens to the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardtune.run.channel import CHANNEL_VARIABLE, Channel, put_message, read_message

WRITER = """
import itertools, os, sys, time
from shardtune.run.channel import Channel, put_message
channel = Channel.inherited(os.environ)
assert channel is not None
print("writing", flush=True)
for n in itertools.count():
    put_message(channel.state, {"n": n, "text": "x" * (n * 7919 % 20_000), "again": n})
    time.sleep(0.0005)  # a rank writes twice a second
"""


@pytest.fixture
def channel():
    made = Channel.create()
    yield made
    made.close()


def test_a_reader_beside_the_writer_sees_whole_messages_that_get_newer(channel: Channel) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER], pass_fds=channel.files, env={**os.environ, **channel.environment()},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        seen, deadline = [], time.monotonic() + 60
        while (not seen or seen[-1]["n"] < 500) and time.monotonic() < deadline:
            if (message := read_message(channel.state)) is not None:
                seen.append(message)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert len({message["n"] for message in seen}) > 10
    assert all(message["n"] == message["again"] for message in seen)
    assert all(len(message["text"]) == message["n"] * 7919 % 20_000 for message in seen)
    numbers = [message["n"] for message in seen]
    assert numbers == sorted(numbers) and numbers[-1] > numbers[0]


def test_nothing_is_read_before_something_is_written_and_a_shorter_message_replaces_a_longer_one(
    channel: Channel,
) -> None:
    assert read_message(channel.state) is None
    put_message(channel.state, {"text": "long " * 1000})
    put_message(channel.state, {"text": "short"})
    assert read_message(channel.state) == {"text": "short"}


def test_a_message_cut_by_a_kill_is_none(channel: Channel) -> None:
    put_message(channel.failure, {"text": "x" * 10_000})
    os.ftruncate(channel.failure, 5_000)
    assert read_message(channel.failure) is None


@pytest.mark.parametrize("value", [None, "", "7", "3:1.1,4:1.1,5:1.1,6:1.1", "x:y,x:y,x:y,x:y"])
def test_without_a_launcher_there_is_no_channel(value: str | None) -> None:
    assert Channel.inherited({} if value is None else {CHANNEL_VARIABLE: value}) is None


def test_no_file_is_left_or_needed_anywhere(channel: Channel) -> None:
    if not hasattr(os, "memfd_create"):
        pytest.skip("files in memory are Linux's")
    assert all(str(Path(f"/proc/self/fd/{number}").readlink()).startswith("/memfd:") for number in channel.files)
