from __future__ import annotations

from dataclasses import replace

from shardtune.launch.coordinator import COLLECT_SECONDS, Coordinator, Directive, Report, on_masters_clock
from shardtune.run.findings import Finding

HOSTS = ("a", "b", "c")
ERROR = Finding("error", 50.0, 1, "b", 1, text="ValueError: boom")


def coordinator(restarts: int = 0) -> Coordinator:
    made = Coordinator(HOSTS, node_timeout=10, restarts_left=restarts, now=0.0)
    for node in range(3):
        made.receive(Report(node, HOSTS[node], count=1), 0.0)
    return made


def report(node: int, count: int = 2, **more: object) -> Report:
    return Report(node, HOSTS[node], count=count, **more)  # type: ignore[arg-type]


def test_while_all_report_the_word_is_to_go_on() -> None:
    assert coordinator().directive(5.0, 0.0) == Directive()


def test_when_all_are_done_it_ends() -> None:
    made = coordinator()
    for node in range(3):
        assert made.directive(1.0, 0.0).state == "go"
        made.receive(report(node, state="done"), 1.0)
    assert made.directive(1.0, 0.0) == Directive("end", code=0)


def test_a_node_that_was_asked_to_stop_stops_all_and_the_code_says_so() -> None:
    made = coordinator()
    made.receive(report(2, state="stopping", signal=15), 1.0)
    assert made.directive(1.0, 0.0) == Directive("stop", signal=15)
    for node in range(3):
        made.receive(report(node, 3, state="done", code=75), 2.0)
    assert made.directive(2.0, 0.0) == Directive("end", code=75)


def test_a_node_that_has_stopped_before_the_others_heard_of_it_stops_them() -> None:
    made = coordinator()
    made.receive(report(2, state="done", code=75), 1.0)
    assert made.directive(1.0, 0.0) == Directive("stop", signal=15)


def test_after_a_failure_all_are_heard_before_the_cause_is_told() -> None:
    made = coordinator(restarts=1)
    made.receive(report(0, state="failed"), 1.0)
    assert made.directive(1.0, 0.0).state == "collect"
    made.receive(report(0, 3, state="collected", findings=(Finding("peer_lost", 49.0, 0, "a", 0, text="closed"),)), 2.0)
    made.receive(report(2, 3, state="collected"), 2.0)
    assert made.directive(2.0, 0.0).state == "collect"
    made.receive(report(1, 3, state="collected", findings=(ERROR,)), 3.0)
    last = made.directive(3.0, 100.0)
    assert (last.state, last.code, last.restart) == ("end", 1, True) and "boom" in last.text
    assert made.directive(999.0, 0.0) is last, "the last word stays"


def test_a_node_whose_reports_stand_still_is_lost() -> None:
    made = coordinator()
    for now in (5.0, 9.0, 11.0, 12.0):
        for node in (0, 1):
            made.receive(report(node, int(now)), now)
        made.receive(report(2, 1), now)  # the same report, read again and again
        directive = made.directive(now, 0.0)
    assert directive.state == "collect"
    for node in (0, 1):
        made.receive(report(node, 99, state="collected"), 13.0)
    last = made.directive(13.0, 100.0)
    assert last.code == 69 and "Node 2 (c) stopped responding 13 s ago." in last.text


def test_a_node_that_says_nothing_after_a_failure_is_lost_sooner() -> None:
    made = coordinator()
    made.receive(report(1, state="failed"), 1.0)
    made.directive(1.0, 0.0)
    for node in (0, 1):
        made.receive(report(node, 3, state="collected"), 2.0)
    assert made.directive(2.0, 0.0).state == "collect"
    assert "Node 2 (c)" in made.directive(1.0 + COLLECT_SECONDS + 0.1, 0.0).text


def test_a_mistake_is_not_followed_by_another_start() -> None:
    made = coordinator(restarts=5)
    made.receive(report(0, state="failed"), 1.0)
    made.directive(1.0, 0.0)
    for node in range(3):
        wrong = Finding("user_error", 1.0, node, HOSTS[node], node, text="error: no", exit_code=2)
        made.receive(report(node, 3, state="collected", findings=(wrong,)), 2.0)
    last = made.directive(2.0, 0.0)
    assert (last.code, last.restart) == (2, False)


def test_reports_and_words_survive_the_way_through_the_store() -> None:
    said = report(1, state="collected", findings=(ERROR,))
    assert Report.from_json(said.to_json()) == said
    directive = Directive("end", code=1, text="größe", findings=(ERROR.as_dict(),))
    assert Directive.from_json(directive.to_json()) == directive


def test_times_of_a_node_with_a_wrong_clock_are_corrected() -> None:
    late = replace(report(1, findings=(ERROR,)), time=1000.0)
    assert on_masters_clock(late, seen=1000.2) is late
    assert on_masters_clock(late, seen=400.0).findings[0].time == ERROR.time - 600
