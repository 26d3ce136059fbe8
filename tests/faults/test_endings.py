"""A run that is done ends with 0, however busy the machine is."""

from __future__ import annotations

import pytest
from faults.endings import main


@pytest.mark.slow
def test_runs_that_are_done_end_with_0_beside_a_busy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--toy", "--runs", "5", "--busy", "2"]) == 0
    assert "5 with exit code 0" in capsys.readouterr().out
