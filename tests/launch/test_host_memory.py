"""A rank that the kernel killed for memory is told from one that somebody killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shardtune.launch import workers as workers_module
from shardtune.launch.findings import Finding, cause_of
from shardtune.launch.host_memory import oom_kills
from shardtune.launch.workers import LocalWorkers


def cgroup(folder: Path, own: str, file: str, text: str) -> tuple[Path, Path]:
    mine = folder / "cgroup"
    mine.write_text(own)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    return folder, mine


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/pod/a\n", "pod/a/memory.events"),
        ("0::/pod/a\n", "memory.events"),  # a container that sees its own cgroup as the root
        ("9:cpu:/\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
    ],
)
def test_kills_are_read_from_either_version_of_cgroups(tmp_path: Path, own: str, file: str) -> None:
    text = "low 0\noom 3\noom_kill 2\n" if file.endswith("events") else "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    assert oom_kills(*cgroup(tmp_path, own, file, text)) == 2


def test_nothing_is_claimed_where_nobody_counts(tmp_path: Path) -> None:
    assert oom_kills(*cgroup(tmp_path, "0::/\n", "cpu.stat", "usage 1\n")) is None
    assert oom_kills(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("before", "after", "number", "said"),
    [
        (1, 2, signal.SIGKILL, "The host's memory ran out"),
        (1, 1, signal.SIGKILL, "counts no kill for memory"),
        (None, None, signal.SIGKILL, ""),
        (1, 2, signal.SIGSEGV, ""),
    ],
)
def test_the_count_before_and_after_says_why(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, number: int, said: str
) -> None:
    workers = object.__new__(LocalWorkers)
    workers._oom_kills = before
    monkeypatch.setattr(workers_module, "oom_kills", lambda: after)
    why = workers._why_killed(number)
    assert said in why and bool(why) == bool(said)


def test_the_message_says_what_the_cgroup_says() -> None:
    killed = Finding("killed", 1.0, 0, "host", 1, text="The host's memory ran out: counted.", exit_code=137)
    assert "why: The host's memory ran out: counted." in cause_of([killed], 1).text
    assert (
        "Linux does that when memory runs out" in cause_of([Finding("killed", 1.0, 0, "h", 1, exit_code=137)], 1).text
    )
