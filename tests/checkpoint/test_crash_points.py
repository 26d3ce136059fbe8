"""At any instant a kill -9 leaves only complete checkpoints visible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).parent / "crash_points.py"


def test_a_save_killed_before_any_of_its_file_system_calls_leaves_only_sound_checkpoints(
    environment: dict[str, str], tmp_path: Path
) -> None:
    counted = killed("saves", environment, tmp_path)
    assert counted["new"] > 50 and counted["again"] > 50  # or the shim sees nothing


def test_making_final_another_checkpoints_survives_a_kill_before_any_of_its_file_system_calls(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert killed("final", environment, tmp_path)["final"] > 50


def killed(what: str, environment: dict[str, str], folder: Path) -> dict[str, int]:
    """How many calls there were of each kind, each of which was the last one of a process."""
    result = subprocess.run(
        [sys.executable, str(DRIVER), what, str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return {name: int(number) for name, number in map(str.split, result.stdout.splitlines())}
