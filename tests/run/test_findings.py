from __future__ import annotations

import pytest

from shardtune.run.findings import Finding, cause_of


def found(kind: str, rank: int | None, time: float, **more: object) -> Finding:
    return Finding(kind, time, node=(rank or 0) // 2, host=f"host{(rank or 0) // 2}", rank=rank, **more)  # type: ignore[arg-type]


def test_the_error_that_came_first_is_told_not_its_echo() -> None:
    echo = found("peer_lost", 0, 1.0, text="RuntimeError: Connection closed by peer")
    cause = cause_of([echo, found("error", 2, 5.0, text="Traceback\nValueError: the cause")], nnodes=2)
    assert cause.text.startswith("Rank 2 (node 1, host1) failed first")
    assert "the cause" in cause.text and "closed" not in cause.text
    assert (cause.code, cause.restartable) == (1, True)


def test_of_two_errors_the_earlier_one_is_told() -> None:
    first, second = found("error", 3, 1.0, text="one"), found("error", 0, 2.0, text="two")
    assert cause_of([second, first], 2).finding is first


def test_a_mistake_all_ranks_see_is_told_once_as_it_is_and_not_tried_again() -> None:
    same = [found("user_error", rank, 1.0 + rank, text="error: No such file.", exit_code=2) for rank in range(3)]
    cause = cause_of(same, 1)
    assert (cause.text, cause.code, cause.restartable) == ("error: No such file.", 2, False)


def test_a_machine_at_fault_is_told_as_it_is_and_tried_again() -> None:
    same = [found("machine_error", rank, 1.0 + rank, text="error: Replicas differ.") for rank in range(3)]
    cause = cause_of(same, 3)
    assert (cause.text, cause.code, cause.restartable) == ("error: Replicas differ.", 1, True)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("killed", 137, "was killed by signal 9 (SIGKILL) while saving"),
        ("stopped", 76, "was stopped (SIGSTOP or a debugger) while saving"),
        ("stalled", 76, "hung while saving"),
        ("silent", 76, "does not respond at all"),
        ("exited", 137, "ended with exit code 137 and no error message"),
    ],
)
def test_a_cause_explains_those_who_waited_for_it_whenever_they_noticed(kind: str, code: int, words: str) -> None:
    guilty = found(kind, 1, 9.0, exit_code=137, doing="saving")
    cause = cause_of([found("waiting", 0, 1.0), guilty, found("waiting", 2, 2.0)], 1)
    assert cause.finding is guilty
    assert cause.text.startswith("error: Rank 1 ") and words in cause.text
    assert (cause.code, cause.restartable) == (code, True)


def test_those_who_waited_are_counted() -> None:
    cause = cause_of([found("waiting", 2, 1.0), found("stopped", 1, 3.0), found("peer_lost", 0, 2.0)], 1)
    assert "Ranks 0, 2 waited for it." in cause.text


def test_when_all_wait_nobody_is_accused() -> None:
    cause = cause_of([found("waiting", rank, 1.0, doing="computing a step (step 3)") for rank in range(2)], 1)
    assert "all are waiting for each other" in cause.text and cause.code == 76


def test_a_lost_node_explains_broken_connections_but_not_an_error_of_a_ranks_own() -> None:
    lost = Finding("lost", 1.0, 1, "b", text="Node 1 (b) stopped responding 9 s ago.")
    assert cause_of([found("peer_lost", 0, 0.5, text="x"), found("waiting", 1, 0.6), lost], 2).code == 69
    assert cause_of([lost, found("error", 0, 3.0, text="ValueError")], 2).code == 1


def test_a_broken_connection_that_nobody_explains_says_so() -> None:
    cause = cause_of([found("peer_lost", 1, 1.0, text="Traceback\nRuntimeError: Connection reset by peer\n")], 1)
    assert "no rank reported why" in cause.text and "Rank 1 noticed first: RuntimeError: Connection reset" in cause.text
