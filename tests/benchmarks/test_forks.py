"""Measurements that begin as forks of one process end as processes of their own do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from apart import members
from forks import Forks

ENDINGS = {
    "print('fine')": (0, "fine"),
    "raise SystemExit(3)": (3, ""),
    "raise SystemExit('no way')": (1, "no way"),
    "open('/no/such/file')": (1, "FileNotFoundError"),
    "import os; os._exit(7)": (7, ""),
    "import os; print(os.environ['WORD'], os.getsid(0) == os.getpid())": (0, "told True"),
    "import sys; print('colorsys' in sys.modules, sys.argv[1:])": (0, "True ['one', 'two']"),
}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(imported=("colorsys",))
    yield forks
    forks.close()


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "WORD": "told"}


@pytest.mark.parametrize("program", list(ENDINGS))
def test_a_command_ends_with_its_code_and_all_it_said_is_in_its_log(
    forks: Forks, environment: dict[str, str], tmp_path: Path, program: str
) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(program)
    ended = forks.run([sys.executable, str(script), "one", "two"], log, 60.0, environment)
    code, said = ENDINGS[program]
    assert ended.code == code and said in log.read_text()


def test_a_module_is_run_as_a_program(forks: Forks, environment: dict[str, str], tmp_path: Path) -> None:
    ended = forks.run([sys.executable, "-m", "json.tool", "--help"], tmp_path / "log", 60.0, environment)
    assert ended.code == 0 and "usage" in (tmp_path / "log").read_text()


def test_what_takes_too_long_is_ended_with_all_it_started(
    forks: Forks, environment: dict[str, str], tmp_path: Path
) -> None:
    script, log, known = tmp_path / "script.py", tmp_path / "log", tmp_path / "pid"
    script.write_text(
        "import os, subprocess, sys, time\nfrom pathlib import Path\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"Path({str(known)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    ended = forks.run([sys.executable, str(script)], log, 3.0, environment)
    assert ended.code is None and members(int(known.read_text())) == []
    script.write_text("print('next')")
    assert forks.run([sys.executable, str(script)], log, 60.0, environment).code == 0
