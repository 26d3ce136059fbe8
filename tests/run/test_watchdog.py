"""A rank that gets on is left alone; one that does not is ended with a code, a stack and a record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardtune.run.channel import Channel, read_message
from shardtune.run.watchdog import BATCH, PREPARING, SAVING, STEP, Limits

SCRIPT = """
import sys, time, os
from pathlib import Path
from shardtune.observe.events import EventLog
from shardtune.run.watchdog import *
from shardtune.run import watchdog
folder = Path(sys.argv[1])
with Watchdog(3, Limits(load=100, step=2, checkpoint=100)) as dog:
    dog.write_to(folder, EventLog(folder, 3))
    {body}
print("ended well")
"""


def run(tmp_path: Path, body: str, pass_fds: Sequence[int] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "run").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=240, env={**os.environ, **environ}, pass_fds=pass_fds,
    )  # fmt: skip


def test_a_rank_that_moves_may_take_as_long_as_it_likes(tmp_path: Path) -> None:
    done = run(tmp_path, "for i in range(60): dog.enter(STEP, i); time.sleep(0.05)")  # in all longer than a step may be
    assert (done.returncode, done.stdout) == (0, "ended well\n"), done.stderr
    assert not (tmp_path / "run" / "crash").exists()


def test_preparing_data_has_no_deadline_and_saving_its_own(tmp_path: Path) -> None:
    done = run(tmp_path, "dog.enter(PREPARING); time.sleep(3); dog.enter(SAVING); time.sleep(3)")
    assert done.returncode == 0, done.stderr


def test_a_rank_that_hangs_ends_with_its_stack_and_says_where(tmp_path: Path) -> None:
    done = run(tmp_path, "dog.enter(BATCH, 7); time.sleep(60)")
    assert done.returncode == 76
    assert "Rank 3 hung while reading a batch of data (step 7)." in done.stderr
    assert "Its stack: " in done.stderr and "Traceback" not in done.stderr
    crash = tmp_path / "run" / "crash"
    assert "in <module>" in (crash / "rank-3.txt").read_text()
    json.loads((crash / "rank-3-collectives.json").read_text())
    (event,) = map(json.loads, (tmp_path / "run" / "events-rank3.jsonl").read_text().splitlines())
    assert (event["event"], event["kind"], event["limit_seconds"]) == ("no_progress", "stalled", 2)


def test_with_a_launcher_it_leaves_a_record_and_is_silent(tmp_path: Path) -> None:
    channel = Channel.create()
    done = run(tmp_path, "dog.enter(STEP, 7); time.sleep(60)", channel.files, **channel.environment())
    assert (done.returncode, done.stderr) == (76, "")
    record, state = read_message(channel.failure), read_message(channel.state)
    channel.close()
    assert record is not None and state is not None
    assert (record["kind"], record["exit_code"], record["doing"]) == ("stalled", 76, "computing a step (step 7)")
    assert state["doing"] == "computing a step (step 7)" and state["folder"] == str(tmp_path / "run")


@pytest.mark.parametrize("trouble", ["dog._events.path = None", "dog._dump = None", "dog._main_stack = None"])
def test_whatever_telling_it_meets_the_process_ends(tmp_path: Path, trouble: str) -> None:
    done = run(tmp_path, f"{trouble}; dog.enter(STEP, 7); time.sleep(60)")
    assert done.returncode == 76, done.stderr


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    done = run(tmp_path, "dog.enter(STEP)\nimport threading; assert threading.active_count() == 1")
    assert done.returncode == 0, done.stderr


def test_a_rank_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    done = run(tmp_path, "dog.enter(PREPARING); time.sleep(60)", SHARDTUNE_LAUNCHER_PID="1")
    assert done.returncode == 69
    assert "the launcher is gone" in done.stderr


@pytest.mark.parametrize(("phase", "limit"), [(STEP, 2), (BATCH, 2), (SAVING, 3), (PREPARING, None)])
def test_every_phase_is_held_to_its_limit(phase: str, limit: float | None) -> None:
    assert Limits(load=1, step=2, checkpoint=3).of_phase(phase) == limit
