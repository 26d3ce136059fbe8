"""Faults again and again on a training: the result is that of a run without any."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from faults.soak import Log, deal, main


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)  # some minutes on two quiet cores; a fault may take four before it counts as lost
def test_a_training_that_was_hit_by_every_kind_of_fault_learns_the_same_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With this seed most of them hit the master; `make soak` has more."""
    assert main(["--faults", "5", "--seed", "24"]) == 0
    said = capsys.readouterr().out
    assert "5 faults" in said and "the result is the same" in said
    assert all(f"\n{kind} " in f"\n{said}" for kind in ("kill_worker", "stop_worker", "end_node"))


def test_every_kind_of_fault_comes_before_any_comes_again() -> None:
    networked = SimpleNamespace(hub="hub")
    kinds = [fault.__name__ for fault in deal(networked, 10, Random(3))]  # type: ignore[arg-type]
    assert len(kinds) == 10 and len(set(kinds[:4])) == len(set(kinds[4:8])) == 4
    assert "cut" not in [fault.__name__ for fault in deal(SimpleNamespace(hub=None), 10, Random(3))]  # type: ignore[arg-type]


def test_a_log_is_read_on_line_by_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "events.jsonl")
    assert (log.read().attempts, log.steps_of_attempt) == (0, 0)
    with log.path.open("a") as file:
        file.write('{"event": "run_start"}\n{"event": "step"}\n{"event": "step"}\n{"event": "st')
        file.flush()
        assert (log.read().attempts, log.steps_of_attempt) == (1, 2)
        file.write('ep"}\n')
        file.flush()
        assert (log.read().attempts, log.steps_of_attempt) == (1, 3)
        file.write('{"event": "run_start"}\n')
    assert (log.read().attempts, log.steps_of_attempt) == (2, 0)
