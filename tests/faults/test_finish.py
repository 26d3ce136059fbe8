"""A run that is done ends with 0, however busy the machine is. `finish.py --runs 300` asks it more often."""

from __future__ import annotations

import pytest
from faults.finish import finish


@pytest.mark.slow
def test_runs_that_are_done_end_with_0_beside_a_busy_machine() -> None:
    assert finish(4, at_once=2, busy=2) == {0: 4}
