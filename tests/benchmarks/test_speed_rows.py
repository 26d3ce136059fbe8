"""What was reached: ratios and numbers against their bars, and what cannot be said."""

from __future__ import annotations

import pytest
from cases import CASES
from rows import LABELS, ROWS, Bar, Row, cases_of, verdicts

MEASURED = {
    "mine": {"tokens_per_second": 300.0, "peak_gib": 8.0, "trainable": 5},
    "theirs": {"tokens_per_second": 200.0, "peak_gib": 10.0, "trainable": 5},
    "larger": {"tokens_per_second": 200.0, "peak_gib": 10.0, "trainable": 7},
    "broken": {"why": "out of memory"},
}


def verdict(bar: Bar, mine: str = "mine") -> tuple[float | None, str]:
    (found,) = verdicts((Row("row", "A row", mine, (bar,)),), MEASURED)
    return found.value, found.word


@pytest.mark.parametrize(
    ("bar", "value", "word"),
    [
        (Bar("speed", "theirs", 1.5), 1.5, "reached"),
        (Bar("speed", "theirs", 1.6), 1.5, "MISSED"),
        (Bar("speed", "theirs", 1.4, stretch=1.5), 1.5, "stretch reached"),
        (Bar("speed", "theirs", 1.4, stretch=1.6), 1.5, "reached"),
        (Bar("speed", "theirs", stretch=1.6), 1.5, "stretch missed"),
        (Bar("speed", "theirs"), 1.5, "told"),
        (Bar("peak", "theirs", 0.8), 0.8, "reached"),
        (Bar("peak", "theirs", 0.7), 0.8, "MISSED"),
        (Bar("speed", None, 300), 300, "reached"),
        (Bar("speed", None, 301), 300, "MISSED"),
        (Bar("speed", None, 0, stretch=400), 300, "reached"),
        (Bar("peak", None, 8), 8, "reached"),
        (Bar("peak", None, 7.9), 8, "MISSED"),
    ],
)
def test_speed_shall_be_at_least_and_memory_at_most(bar: Bar, value: float, word: str) -> None:
    assert verdict(bar) == (pytest.approx(value), word)


def test_what_was_not_measured_says_why_and_reaches_nothing() -> None:
    assert verdict(Bar("speed", "broken", 1.0)) == (None, "not measured (broken: out of memory)")
    assert verdict(Bar("speed", "absent", 1.0)) == (None, "not measured (absent: not asked for)")
    assert verdict(Bar("speed", None, 0), mine="broken") == (None, "not measured (broken: out of memory)")


def test_a_ratio_between_different_adapters_says_so() -> None:
    assert verdict(Bar("speed", "larger", 1.5)) == (1.5, "reached, but adapters differ: 5 and 7 parameters")


def test_every_row_names_cases_that_exist_and_references_have_a_label() -> None:
    needed = cases_of(ROWS)
    assert len(needed) == len(set(needed)) and set(needed) <= set(CASES)
    assert all(CASES[row.ours].by == "ours" for row in ROWS)
    assert {bar.against for row in ROWS for bar in row.bars if bar.against} == set(LABELS)


def test_a_row_and_its_reference_train_the_same_model() -> None:
    for row in ROWS:
        for bar in row.bars:
            if bar.against is not None:
                assert CASES[bar.against].model == CASES[row.ours].model
                assert CASES[bar.against].short == CASES[row.ours].short or bar.against == "dense-4k"
