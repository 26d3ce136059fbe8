"""Shell completion, in a real interactive bash on a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash")


class Terminal:
    """An interactive bash; `press` types keys and waits until the screen shows a text."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        assert BASH is not None
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [BASH, "--rcfile", str(home / ".bashrc"), "-i"],
            stdin=slave, stdout=slave, stderr=slave, cwd=home, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)

    def press(self, keys: str, until: str, seconds: float = 60) -> str:
        os.write(self.master, keys.encode())
        shown, end = "", time.monotonic() + seconds
        while until not in shown:
            assert time.monotonic() < end, f"no {until!r} after {keys!r}: {shown!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                shown += os.read(self.master, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(tmp_path: Path, environment: dict[str, str]) -> Iterator[Terminal]:
    """A bash in an empty home, after `shardtune --install-completion` there."""
    installed = tmp_path / "bin" / "shardtune"
    installed.parent.mkdir()
    installed.write_text(f"#!{sys.executable}\nfrom shardtune.cli.main import main\nmain()\n")
    installed.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    run = home / "runs" / "20260101-101010-abcd"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    environment = {
        **environment, "HOME": str(home), "PATH": f"{installed.parent}:{os.environ['PATH']}", "TERM": "dumb",
    }  # fmt: skip
    assert BASH is not None
    done = subprocess.run(
        [BASH, "-c", "shardtune --install-completion; true"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "bash completion installed" in done.stdout, done.stdout + done.stderr
    found = Terminal(home, environment)
    yield found
    found.close()


def test_commands_options_settings_and_runs_are_completed(terminal: Terminal) -> None:
    terminal.press("printf '%s\\n' re''ady\n", "ready\r\n")
    terminal.press("shardtune checkp\t", "shardtune checkpoints ")
    terminal.press("2026\t", "20260101-101010-abcd")
    terminal.press("\x15shardtune train --accel\t", "--accelerate-config ")
    terminal.press("\x15shardtune train run.yaml -o train.learning_r\t", "train.learning_rate=")
    terminal.press("\x15shardtune explain reshard_\t", "reshard_after_forward")
