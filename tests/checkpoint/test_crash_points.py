"""At any instant a kill -9 leaves only complete checkpoints visible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).parent / "crash_points.py"


def test_a_save_killed_before_any_of_its_file_system_calls_leaves_only_sound_checkpoints(
    environment: dict[str, str], tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    counted = dict(line.split() for line in result.stdout.splitlines())
    assert int(counted["new"]) > 50 and int(counted["again"]) > 50  # or the shim sees nothing
