"""A rank that the kernel killed for memory is told from one that somebody killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shardtune.launch import workers as workers_module
from shardtune.launch.workers import LocalWorkers
from shardtune.machine import oom_kills
from shardtune.run.findings import Finding, cause_of


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
        (1, 2, signal.SIGKILL, True),
        (1, 1, signal.SIGKILL, False),
        (None, None, signal.SIGKILL, None),
        (1, 2, signal.SIGSEGV, None),
    ],
)
def test_the_count_before_and_after_says_why(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, number: int, said: bool | None
) -> None:
    workers = object.__new__(LocalWorkers)
    workers._oom_kills = before
    monkeypatch.setattr(workers_module, "oom_kills", lambda: after)
    assert workers._killed_for_memory(number) is said


@pytest.mark.parametrize(
    ("for_memory", "words", "never"),
    [
        (True, ["The host ran out of memory", "Give the job more memory"], ["operator", "scheduler"]),
        (False, ["recorded no OOM kill", "for who killed it"], ["more memory", "Out of memory"]),
        (None, ["Either the kernel's OOM killer", "if it names this process"], []),
    ],
)
def test_the_advice_follows_from_what_the_cgroup_says(
    for_memory: bool | None, words: list[str], never: list[str]
) -> None:
    killed = Finding("killed", 1.0, 0, "host", 1, exit_code=137, for_memory=for_memory)
    text = cause_of([killed], 1).text
    assert all(word in text for word in words) and not any(word in text for word in never)
