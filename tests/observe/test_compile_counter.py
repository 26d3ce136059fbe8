"""Graphs that are compiled: counted for the step they were made in, and said when it is no longer to be expected."""

from __future__ import annotations

import pytest

from shardtune.observe import compile_counter
from shardtune.observe.compile_counter import CompileCounter


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the compiler has made so far, at its last place."""
    box = [0]
    monkeypatch.setattr(compile_counter, "graphs_compiled", lambda: box[-1])
    return box


def counted(made: list[int], *steps: int) -> tuple[list[int], list[str]]:
    said: list[str] = []
    count = CompileCounter(said.append)
    found = []
    for number, graphs in enumerate(steps, 1):
        made.append(made[-1] + 7)  # between two steps: an evaluation
        count.begin_step()
        made.append(made[-1] + graphs)
        found.append(count.end_step(number))
    return found, said


def test_graphs_count_for_their_step_and_those_of_the_first_steps_are_not_remarked(made: list[int]) -> None:
    assert counted(made, 2, 1, 1, 0, 0) == ([2, 1, 1, 0, 0], [])


def test_a_later_one_is_said_with_its_step_and_three_times_at_most(made: list[int]) -> None:
    found, said = counted(made, 1, 0, 0, 0, 1, 1, 0, 1, 1)
    assert found == [1, 0, 0, 0, 1, 1, 0, 1, 1]
    assert [line.split(" was slow")[0] for line in said] == ["step 5", "step 6", "step 8"]
    assert ["not reported again" in line for line in said] == [False, False, True]


def test_a_compiler_that_was_reset_in_between_takes_nothing_away(made: list[int]) -> None:
    assert counted(made, 1, -1)[0] == [1, 0]
