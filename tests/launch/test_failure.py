from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from shardtune.errors import ShardtuneError, UserInputError
from shardtune.launch.failure import ERRORS_VARIABLE, kind_of, leave_record, read_records, render, report_failure

MISTAKE = UserInputError("The file is missing.", why="It was moved.", fix="Move it back.")


def crash(message: str = "boom") -> Exception:
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        return error


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ERRORS_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERRORS_VARIABLE, raising=False)


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
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(MISTAKE, 1) == 2
    assert capsys.readouterr().err == ""
    (record,) = read_records(folder)
    assert (record["rank"], record["kind"], record["text"], record["exit_code"]) == (1, "mistake", render(MISTAKE), 2)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MISTAKE, "mistake"),
        (ShardtuneError("the loss is nan"), "answer"),
        (ValueError("boom"), "error"),
        (RuntimeError("boom"), "error"),
        (OSError("connection refused"), "error"),
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"
            ),
            "echo",
        ),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), "echo"),
        (RuntimeError("[enforce fail] Timed out waiting 30000ms for recv operation to complete"), "echo"),
    ],
)
def test_what_a_rank_says_about_others_is_told_from_what_it_did_itself(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind


def test_a_folder_without_reports_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank0.tmp").write_text('{"half')
    assert read_records(tmp_path) == []


@pytest.mark.parametrize("text", ["größe 👍", "bad name \udcff", "two\nlines\x00"])
def test_any_text_survives_the_way_to_the_launcher(folder: Path, text: str) -> None:
    report_failure(ShardtuneError(text), 0)
    assert [record["text"] for record in read_records(folder)] == [f"error: {text}"]


def test_a_report_is_valid_json_and_nothing_else_is_left(folder: Path) -> None:
    report_failure(crash(), 5)
    assert [path.name for path in folder.iterdir()] == ["rank5.json"]
    record = json.loads((folder / "rank5.json").read_text())
    assert (record["rank"], record["kind"], record["exit_code"]) == (5, "error", 1)


def test_a_launcher_that_is_gone_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ERRORS_VARIABLE, str(tmp_path / "gone"))
    assert report_failure(MISTAKE, 0) == 2
    assert "error: The file is missing." in capsys.readouterr().err


def test_what_a_rank_meets_after_its_first_failure_does_not_hide_that(folder: Path) -> None:
    assert leave_record(1, "stalled", "No progress for 6 s.", 76)
    assert report_failure(RuntimeError("Connection closed by peer"), 1) == 1
    assert [(record["kind"], record["exit_code"]) for record in read_records(folder)] == [("stalled", 76)]


def test_threads_that_fail_in_the_same_moment_leave_one_record_and_say_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main thread of a rank that is woken finds its connections closed while its watchdog finds it late."""
    together = threading.Barrier(8)

    def fail(rank: int) -> None:
        together.wait()
        report_failure(crash(), rank)

    for rank in range(50):
        threads = [threading.Thread(target=fail, args=(rank,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert capsys.readouterr().err == ""
    assert sorted(record["rank"] for record in read_records(folder)) == list(range(50))
    assert len(list(folder.iterdir())) == 50
