"""Printing to a full disk neither raises nor changes the exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from small_disk import fill, free, small_disk

PROGRAM = """
import sys
from rich.console import Console
from shardtune.observe.output import ignore_write_errors
from small_disk import fill, free
from pathlib import Path
disk = Path(sys.argv[1])
with ignore_write_errors():
    console = Console()
    console.print("before")
    fill(disk)
    for _ in range(100):
        console.print("x" * 200, soft_wrap=True)
        print("y" * 200)
    if sys.argv[2] == "freed":
        free(disk)
        console.print("after")
"""


def run(disk: Path, how: str) -> subprocess.CompletedProcess[str]:
    with (disk / "log.txt").open("w") as log:
        command = [sys.executable, "-c", PROGRAM, str(disk), how]
        return subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)


def test_a_full_disk_drops_words_and_the_process_ends_well(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        done = run(disk, "never freed")
        assert done.returncode == 0, done.stderr
        assert (disk / "log.txt").read_text().startswith("before\n")


def test_once_there_is_room_words_come_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        done = run(disk, "freed")
        assert done.returncode == 0, done.stderr
        assert (disk / "log.txt").read_text().endswith("after\n")


def test_the_test_s_disk_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        code = "print('x' * 9000); import sys; sys.stdout.flush()"
        with (disk / "log.txt").open("w") as log:
            assert subprocess.run([sys.executable, "-c", code], stdout=log, stderr=subprocess.PIPE).returncode != 0
        free(disk)
