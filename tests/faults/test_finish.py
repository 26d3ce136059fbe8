"""A run that is done ends with 0, however busy the machine is. `finish.py --runs 300` asks it more often."""

from __future__ import annotations

import pytest
from faults.finish import finish


@pytest.mark.slow
def test_runs_that_are_done_end_with_0_beside_a_busy_machine() -> None:
    # Two runs of three processes and a busy loop: more than two cores have room for.
    assert finish(4, at_once=2, busy=1) == {0: 4}
