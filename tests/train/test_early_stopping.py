"""A run stops when the validation loss has not improved for as many evaluations as its patience."""

from __future__ import annotations

import json
import math

import pytest

from shardtune.train.early_stopping import EarlyStopping


def stopped_at(losses: list[float], patience: int, min_improvement: float = 0.0) -> int | None:
    """The evaluation (from 0) that ends the run. Between any two the run is resumed from JSON."""
    state = None
    for step, loss in enumerate(losses):
        stopping = EarlyStopping(patience, min_improvement)
        if state is not None:
            stopping.restore(json.loads(state))
        if stopping.update(step, loss):
            return step
        state = json.dumps(stopping.state(), allow_nan=False)
    return None


@pytest.mark.parametrize(
    ("losses", "patience", "threshold", "end"),
    [
        ([3, 2, 1, 0.5], 1, 0.0, None),
        ([3, 2, 2], 1, 0.0, 2),
        ([3, 2, 2.5, 1.9, 2, 2, 2], 2, 0.0, 5),
        ([3, 3.5, 2, 2.5, 1], 2, 0.0, None),
        ([3, 2.95, 2.94], 2, 0.1, 2),
        ([3, 2.95, 2.85, 2.8, 2.7], 2, 0.1, None),  # small improvements add up
        ([3, 2.9], 1, 0.25, 1),
        ([3, 2.75], 1, 0.25, 1),  # more than the threshold, not as much
        ([3, math.nan, 2], 2, 0.0, None),
        ([3, math.nan, math.inf], 2, 0.0, 2),
        ([3, -math.inf], 1, 0.0, 1),
        ([math.nan, math.nan], 2, 0.0, 1),
        ([math.nan, 3, 2], 2, 0.0, None),
    ],
)
def test_it_stops_after_patience_evaluations_without_improvement_across_resumes(
    losses: list[float], patience: int, threshold: float, end: int | None
) -> None:
    assert stopped_at(losses, patience, threshold) == end


def test_an_evaluation_that_a_resumed_run_repeats_counts_once() -> None:
    stopping = EarlyStopping(2, 0.0)
    assert [stopping.update(step, 1.0) for step in (10, 20, 20, 20)] == [False] * 4
    assert stopping.update(30, 1.0)


def test_the_reason_says_the_best_loss_and_where_it_was() -> None:
    stopping = EarlyStopping(2, 0.01)
    for step, loss in ((5, math.nan), (10, 1.25), (20, 1.245)):
        assert not stopping.update(step, loss)
    assert stopping.update(30, math.nan)
    assert stopping.reason == (
        "validation loss did not improve by more than 0.01 in 2 evaluations (last improvement: 1.2500 at step 10)"
    )
    never = EarlyStopping(1, 0.0)
    assert never.update(5, math.nan)
    assert never.reason == "validation loss was NaN or infinite in 1 evaluation"
