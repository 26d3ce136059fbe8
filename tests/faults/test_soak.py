"""The soak's own driver, on the toy worker: three faults, and the result of a run without any."""

from __future__ import annotations

import pytest
from faults.soak import main


@pytest.mark.slow
def test_a_run_that_was_hit_again_and_again_ends_as_if_nothing_had_been(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--toy", "--faults", "3", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "3 faults: the result is the same" in said
