from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_disk import fill, free, small_disk

from shardtune.observe import events as events_module
from shardtune.observe.events import EventLog


def strict(line: str) -> dict:
    """As tools outside Python read JSON: NaN is not a word of it."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    record: dict = json.loads(line, parse_constant=refuse)
    return record


def lines(path: Path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


def test_a_line_says_what_happened_when_and_where(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=3)
    log.write("step", step=25, loss=1.5, learning_rate=None)
    [record] = lines(tmp_path / "events-rank3.jsonl")
    assert record.pop("time") == pytest.approx(time.time(), abs=5)
    assert record == {"v": 2, "rank": 3, "event": "step", "step": 25, "loss": 1.5, "learning_rate": None}


def test_a_diverged_loss_is_still_json_and_still_says_so(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.write("step", loss=math.nan, grad_norm=math.inf, nested={"low": [-math.inf, (math.nan, 1.0)]})
    [record] = lines(log.path)
    assert (record["loss"], record["grad_norm"]) == ("nan", "inf")
    assert record["nested"] == {"low": ["-inf", ["nan", 1.0]]}


def test_each_line_is_on_disk_before_the_next_thing_happens(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    for count in range(1, 4):
        log.write("big", text="x" * 50_000)
        assert len(lines(log.path)) == count


def test_a_killed_process_leaves_complete_lines(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from shardtune.observe.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), 0)\n"
        "for n in range(100): log.write('step', step=n)\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=240).returncode == 9
    assert [record["step"] for record in lines(tmp_path / "events-rank0.jsonl")] == list(range(100))


@pytest.mark.parametrize("text", ["größe 👍", "line\nbreak", "separator\u2028here\x85", "bad name \udcff", '"quoted"'])
def test_any_text_stays_on_its_line_and_comes_back(tmp_path: Path, text: str) -> None:
    log = EventLog(tmp_path, 0)
    log.write("path", name=text)
    [record] = lines(log.path)
    assert record["name"] == text


def test_opening_again_appends(tmp_path: Path) -> None:
    for _ in range(2):
        log = EventLog(tmp_path, 0)
        log.write("run_start")
        log.close()
    assert len(lines(log.path)) == 2


def test_a_line_torn_by_a_crash_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text('{"event": "a"}\n{"event": "st')
    log = EventLog(tmp_path, 0)
    log.write("run_start")
    written = path.read_text().splitlines()
    assert written[1] == '{"event": "st'
    assert strict(written[2])["event"] == "run_start"
    assert len(written) == 3


def test_a_process_killed_while_it_writes_loses_at_most_its_last_line(tmp_path: Path) -> None:
    code = (
        "import os, sys; from itertools import count; from pathlib import Path\n"
        "from shardtune.observe.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), 0)\n"
        "for n in count():\n"
        "    log.write('step', step=n, text='x' * (n * 997 % 60_000))\n"
        "    os.write(1, b'%d\\n' % n)"
    )
    path = tmp_path / "events-rank0.jsonl"
    told = []  # by each process: the last event it had written
    for lines_before_the_kill in (1, 40, 150):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines_before_the_kill)]
        process.kill()
        said += process.stdout.readlines()
        process.wait(60)
        process.stdout.close()
        told.append(int([line for line in said if line.endswith(b"\n")][-1]))
    EventLog(tmp_path, 0).write("run_end")
    written = path.read_text().splitlines()
    whole = [json.loads(line).get("step") for line in written if line.endswith("}")]
    assert len(written) - len(whole) <= 3 and whole[-1] is None  # at most one for each kill; what follows is whole
    starts = [index for index, step in enumerate(whole) if step == 0]
    for begin, end, last in zip(starts, [*starts[1:], len(whole) - 1], told, strict=True):
        assert whole[begin:end] == list(range(end - begin))  # nothing is missing in between
        assert end - begin > last  # and nothing at the end but what was being written


def test_on_a_full_disk_lines_wait_and_come_in_order_once_there_is_room(tmp_path: Path) -> None:
    """Whole: the line the disk filled up in is completed."""
    said: list[str] = []
    with small_disk(tmp_path / "disk", 64) as disk:
        log = EventLog(disk, 0, said.append)
        log.write("step", step=0)
        fill(disk)
        for step in range(1, 30):
            log.write("step", step=step, text="x" * 1000)
        assert said == [
            "events-rank0.jsonl cannot be written: No space left on device. Training continues; events are kept in "
            "memory until it can be written again."
        ]
        assert [json.loads(line)["step"] for line in log.lines()] == list(range(30))
        free(disk)
        log.write("step", step=30)
        written = lines(log.path)
        log.close()
    assert [record["step"] for record in written[:-1]] == list(range(31))
    assert (written[-1]["event"], written[-1]["about"]) == ("warning", "events")
    assert len(said) == 2 and said[1] == written[-1]["text"] and "can be written again" in said[1]


def test_memory_is_bounded_and_what_it_had_no_room_for_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_MAX_WAITING_BYTES", 20_000)
    said: list[str] = []
    with small_disk(tmp_path / "disk", 64) as disk:
        log = EventLog(disk, 0, said.append)
        log.write("step", step=0)
        fill(disk)
        for step in range(1, 101):
            log.write("step", step=step, text="x" * 1000)
        free(disk)
        log.write("step", step=101)
        written = lines(log.path)
        log.close()
    steps = [record["step"] for record in written[:-1]]
    lost = 102 - len(steps)
    assert 75 < lost < 90 and f"{lost} older ones are lost" in written[-1]["text"]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-10:] == list(range(92, 102))


def test_a_disk_that_stays_full_is_said_at_the_end_with_what_it_cost(tmp_path: Path) -> None:
    said: list[str] = []
    with small_disk(tmp_path / "disk", 64) as disk:
        log = EventLog(disk, 0, said.append)
        fill(disk)
        for step in range(3):
            log.write("step", step=step)
        log.finish()
        log.close()
    assert (
        len(said) == 2
        and said[1].startswith("3 events could not be written")
        and "are lost: No space left on device" in said[1]
    )


def test_a_folder_that_is_gone_and_comes_back_is_written_to_again(tmp_path: Path) -> None:
    """A lost mount: its folder is missing, then another file lies there."""
    said: list[str] = []
    folder = tmp_path / "run"
    log = EventLog(folder, 0, said.append)
    log.write("step", step=0)
    folder.mkdir()
    log.write("step", step=1)
    log.close()
    assert [record.get("step") for record in lines(log.path)] == [0, 1, None]
    assert "No such file or directory" in said[0] and "can be written again" in said[1]


def test_a_thread_that_hangs_in_a_write_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """The watchdog's last event, while the main thread hangs in the disk."""
    log = EventLog(tmp_path, 0)
    with log._lock:
        log.write("no_progress")
    log.write("run_end")
    assert [record["event"] for record in lines(log.path)] == ["no_progress", "run_end"]
