"""Reading events while they are written, cut, replaced or deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtune.report.read import Tail, event_files, number


def line(**fields: object) -> str:
    return json.dumps({"v": 2, "time": 1.0, "rank": 0, **fields}) + "\n"


def test_a_line_without_its_end_is_read_when_it_is_complete(tmp_path: Path) -> None:
    path, whole = tmp_path / "events-rank0.jsonl", line(event="step", step=1)
    path.write_text(whole + whole[:20])
    tail = Tail(path)
    assert [event["step"] for event in tail.read().events] == [1] and tail.half_line
    with path.open("a") as file:
        file.write(whole[20:])
    news = tail.read()
    assert [event["step"] for event in news.events] == [1] and news.unreadable == 0 and not tail.half_line


def test_a_torn_line_is_counted_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_bytes(
        line(event="a").encode() + b'{"v": 2, "ev\n' + b"\xff\xfe\n" + b"[1]\n\n" + line(event="b").encode()
    )
    news = Tail(path).read()
    assert [event["event"] for event in news.events] == ["a", "b"]
    assert news.unreadable == 3  # the empty line is none


def test_nothing_is_read_twice_and_pieces_join(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text("".join(line(event="step", step=step) for step in range(50)))
    tail, seen = Tail(path), []
    for _ in range(2000):
        seen += [event["step"] for event in tail.read(most=7).events]
    assert seen == list(range(50))


def test_a_file_that_is_another_one_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text(line(event="old") * 5)
    tail = Tail(path)
    tail.read()
    path.write_text(line(event="new"))
    news = tail.read()
    assert news.restarted_file and [event["event"] for event in news.events] == ["new"]


def test_a_file_that_is_gone_has_no_news(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text(line(event="a"))
    tail = Tail(path)
    tail.read()
    path.unlink()
    assert tail.read().events == [] and event_files(tmp_path / "gone") == {}


def test_a_line_that_never_ends_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_bytes(b"x" * (9 << 20) + b"\n" + line(event="after").encode())
    tail = Tail(path)
    found = [tail.read(most=1 << 20) for _ in range(12)]
    assert [event["event"] for news in found for event in news.events] == ["after"]
    assert sum(news.unreadable for news in found) == 1


def test_files_are_found_by_rank_in_order_of_numbers(tmp_path: Path) -> None:
    for name in ("events-rank10.jsonl", "events-rank2.jsonl", "events-rankx.jsonl", "events-rank3.jsonl.tmp"):
        (tmp_path / name).touch()
    assert list(event_files(tmp_path)) == [2, 10]


@pytest.mark.parametrize("value", [True, None, "12", [], 10**400])
def test_what_is_no_number_is_none(value: object) -> None:
    assert number(value) is None


def test_a_loss_that_left_the_numbers_is_read_as_it_was_written() -> None:
    assert number("inf") == float("inf") and str(number("nan")) == "nan" and number(3) == 3.0
