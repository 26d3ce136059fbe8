"""JSON answers are compared by value, field by field, wherever a field stands."""

from __future__ import annotations

import pytest

from shardtune.evaluation.json_fields import FieldCounts, compared, fields, parsed
from shardtune.evaluation.metrics import json_metrics


@pytest.mark.parametrize(
    "text",
    ["", "12", '"a"', "null", '{"a": 1', '{"a": NaN}', "[Infinity]", 'Sure: {"a": 1}', '{"a": 1} {}', "[" * 100_000],
)
def test_only_a_whole_object_or_list_is_json(text: str) -> None:
    assert parsed(text) is None


def test_blanks_around_json_do_not_matter() -> None:
    assert parsed('\n {"a": [1, null]} ') == {"a": [1, None]}


def test_nested_values_are_flattened_to_leaves() -> None:
    assert fields({"a": {"b": [1, {"c": True}]}, "d": {}, "e": "x"}) == [
        (("a", "b", 0), "1"), (("a", "b", 1, "c"), "true"), (("d",), "{}"), (("e",), '"x"'),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "answer", "counts"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, (2, 2, 2)),
        ({"a": 1}, {"a": 1.0}, (1, 1, 1)),
        ({"a": 1}, {"a": "1"}, (1, 1, 0)),
        ({"a": 1}, {"a": True}, (1, 1, 0)),
        ({"a": [1, 2, 3]}, {"a": [1, 3]}, (3, 2, 1)),  # by place
        ({"a": {"b": 1}}, {"a.b": 1}, (1, 1, 0)),
        ({"a": {}}, {"a": []}, (1, 1, 0)),
        ({"a": 1, "b": 2}, None, (2, 0, 0)),
    ],
)
def test_fields_are_right_where_path_and_value_are(expected: object, answer: object, counts: tuple[int, ...]) -> None:
    assert compared(expected, answer) == FieldCounts(*counts)


def test_precision_recall_and_f1_are_over_all_fields_of_all_rows() -> None:
    expected = ['{"a": 1, "b": 2}', '{"a": 3}', "no json", '{"a": 4}']
    answers = ['{"a": 1}', '{"a": 0, "c": 1}', "no json", "broken"]
    found = {one.name: one for one in json_metrics(expected, {"tuned": answers})}
    assert {one.rows for one in found.values()} == {3}
    assert found["json_valid"].sides["tuned"].value == pytest.approx(2 / 3)
    assert found["json_precision"].sides["tuned"].value == pytest.approx(1 / 3)
    assert found["json_recall"].sides["tuned"].value == pytest.approx(1 / 4)
    assert found["json_f1"].sides["tuned"].value == pytest.approx(2 / 7)


def test_without_any_answered_field_there_is_no_precision() -> None:
    found = {
        one.name: one
        for one in json_metrics(['{"a": 1}', '{"a": 2}'], {"base": ["x", "y"], "tuned": ['{"a": 1}', '{"a": 0}']})
    }
    assert found["json_precision"].sides["base"].value is None
    assert found["json_precision"].difference is not None and found["json_precision"].difference.value is None
    assert found["json_f1"].sides["base"].value == 0
    assert found["json_f1"].difference is not None and found["json_f1"].difference.value == pytest.approx(0.5)
