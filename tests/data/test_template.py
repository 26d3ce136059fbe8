from __future__ import annotations

import pytest
import yaml

from shardtune.data.template import Template
from shardtune.errors import UserInputError


@pytest.mark.parametrize(
    ("text", "row", "prompt", "answer"),
    [
        ("{q} => {a}", {"q": "1+1", "a": "2"}, "1+1 => ", "2"),
        ("{q} => {a}!", {"q": "1+1", "a": "2"}, "1+1 => ", "2!"),
        ("{a}", {"a": "2"}, "", "2"),
        ("{q}{a}", {"q": "x", "a": "y"}, "x", "y"),
        ("{q} {q} {a}", {"q": "x", "a": "y"}, "x x ", "y"),
        ("{q} {a} {q}", {"q": "x", "a": "y"}, "x y ", "x"),
        ("{{{q}}} => {{{a}}}", {"q": "x", "a": "y"}, "{x} => {", "y}"),
        ("{{}} {q}: {a} {{end}} {{", {"q": "x", "a": "y"}, "{} x: ", "y {end} {"),
        ("Frage: {frage}\nAntwort: {größe}", {"frage": "ä", "größe": "ß"}, "Frage: ä\nAntwort: ", "ß"),
        ("{q} {a}", {"q": "{a} {{x}}", "a": "{q}"}, "{a} {{x}} ", "{q}"),
        ("{q}:{a}", {"q": 7, "a": 2.5}, "7:", "2.5"),
        ("{q}\r\n{a}", {"q": "x\r\n", "a": "\n y"}, "x\r\n\r\n", "\n y"),
    ],
)  # fmt: skip
def test_the_last_column_starts_the_answer_and_the_text_stays_as_written(
    text: str, row: dict, prompt: str, answer: str
) -> None:
    template = Template.parse(text)
    assert template.render(row) == (prompt, answer)
    assert "".join(template.render(row)) == text.format(**row)


def test_a_column_named_twice_is_listed_once_in_the_order_written() -> None:
    assert Template.parse("{b} {a} {b}").columns == ["b", "a"]


def test_columns_may_have_any_name_a_file_gives_them() -> None:
    template = Template.parse("{my question}: {meta.answer-1}")
    assert template.columns == ["my question", "meta.answer-1"]
    assert template.render({"my question": "x", "meta.answer-1": "y"}) == ("x: ", "y")


def test_yaml_double_quotes_give_a_line_break() -> None:
    text = yaml.safe_load(r'"{q}\n\n{a}"')
    assert Template.parse(text).render({"q": "x", "a": "y"}) == ("x\n\n", "y")


def test_the_advice_can_be_copied_into_yaml() -> None:
    with pytest.raises(UserInputError) as caught:
        Template.parse("no column")
    example = caught.value.fix.removeprefix("For example ").split(";")[0]
    assert Template.parse(yaml.safe_load(example)).render({"instruction": "x", "response": "y"}) == ("x\n\n", "y")


@pytest.mark.parametrize("text", ["{q", "q}", "{q} {", "}{q}"])
def test_unbalanced_braces_are_told_with_how_to_write_a_literal_one(text: str) -> None:
    with pytest.raises(UserInputError) as caught:
        Template.parse(text)
    assert "unbalanced braces" in caught.value.what
    assert caught.value.why
    assert "{{" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain", "no column"),
        ("{{q}}", "no column"),
        ("{}", "{}"),
        ("{q!r}", "{q!r}"),
        ("{q:>10}", "{q:>10}"),
        ('{"intent": "{a}"}', '{"intent": "{a}"}'),
    ],
)
def test_what_is_not_a_plain_column_is_refused_and_shown_as_written(text: str, found: str) -> None:
    with pytest.raises(UserInputError) as caught:
        Template.parse(text)
    assert "prompt_template must name columns" in caught.value.what or "unbalanced" in caught.value.what
    assert found in caught.value.why or "unbalanced" in caught.value.what
