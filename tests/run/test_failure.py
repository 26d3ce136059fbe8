from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from shardtune.errors import MachineError, ShardtuneError, UserInputError
from shardtune.run.channel import CHANNEL_VARIABLE, Channel, read_message
from shardtune.run.failure import kind_of, record_failure, render, report_failure

MISTAKE = UserInputError("The file is missing.", why="It was moved.", fix="Move it back.")


def crash(message: str = "boom") -> Exception:
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        return error


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    made = Channel.create()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHANNEL_VARIABLE, raising=False)


def test_the_three_parts_are_told_each_with_its_word() -> None:
    assert render(MISTAKE) == "error: The file is missing.\n  why: It was moved.\n  fix: Move it back."
    assert render(ShardtuneError("Only this.")) == "error: Only this."


def test_without_a_launcher_the_error_is_printed_without_a_traceback(
    alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(MISTAKE, 0) == 2
    assert capsys.readouterr().err == render(MISTAKE) + "\n"


def test_a_bug_keeps_its_traceback_and_its_rank(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(crash(), 1) == 1
    said = capsys.readouterr().err
    assert said.startswith("rank 1: Traceback")
    assert "RuntimeError: boom" in said


def test_with_a_launcher_the_worker_is_silent_and_the_launcher_tells(
    channel: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(MISTAKE, 1) == 2
    assert capsys.readouterr().err == ""
    record = read_message(channel.failure)
    assert record is not None
    assert (record["rank"], record["kind"], record["text"], record["exit_code"]) == (
        1,
        "user_error",
        render(MISTAKE),
        2,
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MISTAKE, "user_error"),
        (ShardtuneError("the loss is nan"), "known_error"),
        (MachineError("replicas differ"), "machine_error"),
        (ValueError("boom"), "error"),
        (RuntimeError("boom"), "error"),
        (OSError("connection refused"), "error"),
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"
            ),
            "peer_lost",
        ),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), "peer_lost"),
        (RuntimeError("[enforce fail] Timed out waiting 30000ms for recv operation to complete"), "peer_lost"),
    ],
)
def test_what_a_rank_says_about_others_is_told_from_what_it_did_itself(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind


def test_a_rank_that_did_not_fail_has_left_nothing(channel: Channel) -> None:
    assert read_message(channel.failure) is None


@pytest.mark.parametrize("text", ["größe 👍", "bad name \udcff", "two\nlines\x00"])
def test_any_text_survives_the_way_to_the_launcher(channel: Channel, text: str) -> None:
    report_failure(ShardtuneError(text), 0)
    record = read_message(channel.failure)
    assert record is not None and record["text"] == f"error: {text}"


def test_numbers_that_mean_other_files_by_now_are_not_written_to(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that a rank starts has the variable of its rank, and its own files under the same numbers."""
    others = Channel.create()
    mixed = [a.split(":")[0] + ":" + b.split(":")[1] for a, b in zip(*map(_entries, (channel, others)), strict=True)]
    monkeypatch.setenv(CHANNEL_VARIABLE, ",".join(mixed))
    assert report_failure(MISTAKE, 0) == 2
    assert "error: The file is missing." in capsys.readouterr().err
    assert all(os.fstat(number).st_size == 0 for number in (*channel.files, *others.files))
    others.close()


def _entries(channel: Channel) -> list[str]:
    return channel.environment()[CHANNEL_VARIABLE].split(",")


def test_what_a_rank_meets_after_its_first_failure_does_not_hide_that(channel: Channel) -> None:
    assert record_failure(1, "stalled", "No progress for 6 s.", 76)
    assert report_failure(RuntimeError("Connection closed by peer"), 1) == 1
    record = read_message(channel.failure)
    assert record is not None and (record["kind"], record["exit_code"]) == ("stalled", 76)


def test_threads_that_fail_in_the_same_moment_leave_one_record_and_say_nothing(
    channel: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main thread of a rank that is woken finds its connections closed while its watchdog finds it late."""
    together = threading.Barrier(8)

    def fail(number: int) -> None:
        together.wait()
        report_failure(crash(f"number {number} " + "x" * 100_000), 3)

    for _ in range(50):
        os.ftruncate(channel.failure, 0)
        threads = [threading.Thread(target=fail, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record = read_message(channel.failure)
        assert record is not None and record["rank"] == 3 and len(record["text"]) > 100_000
    assert capsys.readouterr().err == ""
