from __future__ import annotations

import datetime
import json
import math
import pickle
from typing import Any

import pytest
from running import REPOSITORY

from shardtune.config import load_config
from shardtune.config.schema import DataSection
from shardtune.data.formats import FormatChoice, Rendered, RowProblem, choose_format, loss_on, renderer
from shardtune.errors import UserInputError

OPENAI = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
SHAREGPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]


def section(**settings: Any) -> DataSection:
    return DataSection(dataset_name_or_path="x", **settings)


def choose(row: dict[str, Any], **settings: Any) -> FormatChoice:
    return choose_format(section(**settings), list(row), [row])


def refusal(row: dict[str, Any], **settings: Any) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        choose(row, **settings)
    return caught.value


def render(row: dict[str, Any], **settings: Any) -> Rendered:
    return renderer(section(**settings), choose(row, **settings), None)(row)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "settings", "name", "columns"),
    [
        ({"text": "x"}, {}, "text", ("text",)),
        ({"body": "x"}, {"text_field": "body"}, "text", ("body",)),
        ({"q": "x", "a": "y"}, {"prompt_template": "{q} {a}"}, "prompt", ("q", "a")),
        ({"prompt": "x", "completion": "y"}, {}, "prompt-completion", ("prompt", "completion")),
        ({"prompt": OPENAI, "completion": OPENAI}, {}, "chat", ("prompt", "completion")),
        ({"prompt": OPENAI, "completion": OPENAI, "tools": None}, {}, "chat", ("prompt", "completion", "tools")),
        ({"messages": OPENAI}, {}, "chat", ("messages",)),
        ({"messages": json.dumps(OPENAI)}, {}, "chat", ("messages",)),
        ({"messages": OPENAI, "tools": None, "system": "S"}, {}, "chat", ("messages", "tools")),
        ({"conversations": SHAREGPT, "system": "S"}, {}, "chat", ("conversations", "system")),
        ({"talk": OPENAI}, {"messages_field": "talk"}, "chat", ("talk",)),
        # What is more telling wins: messages over a pair over a text, a setting over all of them.
        ({"messages": OPENAI, "prompt": "x", "text": "x"}, {}, "chat", ("messages",)),
        ({"prompt": "x", "completion": "y", "text": "x"}, {}, "prompt-completion", ("prompt", "completion")),
        ({"messages": OPENAI, "text": "x"}, {"text_field": "text"}, "text", ("text",)),
        ({"messages": OPENAI, "text": "x"}, {"format": "text"}, "text", ("text",)),
        ({"messages": OPENAI, "q": "x"}, {"prompt_template": "{q}"}, "prompt", ("q",)),
        ({"messages": "a diary", "text": "x"}, {}, "text", ("text",)),
        ({"prompt": "x", "completion": "y"}, {"format": "prompt-completion"}, "prompt-completion", ("prompt", "completion")),
    ],
)  # fmt: skip
def test_the_format_is_seen_in_settings_columns_and_rows(
    row: dict[str, Any], settings: dict[str, Any], name: str, columns: tuple[str, ...]
) -> None:
    choice = choose(row, **settings)
    assert (choice.name, choice.columns) == (name, columns)
    assert f"'{columns[-1] if name == 'prompt' else columns[0]}'" in choice.why


def test_the_form_of_messages_is_named() -> None:
    assert "OpenAI" in choose({"messages": OPENAI}).why
    assert "ShareGPT" in choose({"conversations": SHAREGPT}).why
    assert "ShareGPT" in choose({"conversations": json.dumps(SHAREGPT)}).why
    assert "with 'tools'" in choose({"messages": OPENAI, "tools": None}).why


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": OPENAI, "text": "x"}, "; not read: 'text' (set data.format: text to train on that instead)"),
        ({"messages": OPENAI, "prompt": "x", "completion": "y"}, "; not read: 'prompt' and 'completion' ("),
        ({"prompt": "x", "completion": "y", "text": "x"}, "; not read: 'text' ("),
    ],
)
def test_columns_that_could_be_trained_on_instead_are_told_with_the_setting(row: dict[str, Any], told: str) -> None:
    assert told in choose(row).why


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"messages": OPENAI, "prompt": "x"}, {}),
        ({"prompt": OPENAI, "completion": OPENAI, "messages": OPENAI}, {}),
        ({"messages": OPENAI, "text": "x"}, {"format": "chat"}),
    ],
)
def test_nothing_is_told_of_columns_where_there_is_no_other_choice_or_it_was_made(
    row: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert "not read" not in choose(row, **settings).why


def test_a_null_in_the_first_row_does_not_hide_the_format() -> None:
    rows = [{"messages": None}, {"messages": OPENAI}]
    assert choose_format(section(), ["messages"], rows).name == "chat"


def test_no_format_lists_the_columns_and_suggests_a_template_from_them() -> None:
    problem = refusal({"instruction": "x", "output": "y", "id": 3})
    assert "instruction, output, id" in problem.why
    assert '"{instruction}\\n\\n{output}"' in problem.fix


@pytest.mark.parametrize(
    ("row", "settings", "what"),
    [
        ({"txt": "a"}, {"text_field": "text"}, "lacks the column 'text', which data.text_field names"),
        ({"txt": "a"}, {"format": "text"}, "data.format is text, but the data has no column 'text'."),
        ({"q": "a"}, {"prompt_template": "{q} {a}"}, "lacks the column 'a', which data.prompt_template names"),
        ({"q": "a"}, {"messages_field": "talk"}, "lacks the column 'talk', which data.messages_field names"),
        ({"prompt": "a"}, {"format": "prompt-completion"}, "lacks the column 'completion', which data.format"),
        (
            {"q": "a"},
            {"prompt_template": "{q} {recipe} {json}"},
            "The data lacks the columns 'recipe' and 'json', which data.prompt_template names",
        ),
    ],
)
def test_a_missing_column_is_told_with_those_that_are_there(
    row: dict[str, Any], settings: dict[str, Any], what: str
) -> None:
    problem = refusal(row, **settings)
    assert what in problem.what
    assert f"Its columns are: {', '.join(row)}." in problem.why
    assert problem.fix


def test_what_was_asked_for_and_is_not_there_is_told() -> None:
    assert "no column of messages" in refusal({"text": "x"}, format="chat").what
    assert "prompt_template is not set" in refusal({"text": "x"}, format="prompt").what
    assert "does not contain messages" in refusal({"messages": "a diary"}, format="chat").what
    assert "prompt_template is set" in refusal({"text": "x"}, format="text", prompt_template="{text}").what


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"text": "x"}, {"train_on": "completion"}),
        ({"text": "x"}, {"train_on": "assistant"}),
        ({"prompt": "x", "completion": "y"}, {"train_on": "assistant"}),
        ({"messages": OPENAI}, {"train_on": "completion"}),
    ],
)
def test_a_part_that_such_rows_do_not_have_cannot_be_trained_on(row: dict[str, Any], settings: dict[str, Any]) -> None:
    problem = refusal(row, **settings)
    assert f"data.train_on: {settings['train_on']}" in problem.what
    assert "all" in problem.fix


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "x"}, "all"),
        ({"prompt": "x", "completion": "y"}, "completion"),
        ({"messages": OPENAI}, "assistant"),
        ({"prompt": OPENAI, "completion": OPENAI}, "completion"),
    ],
)
def test_what_carries_loss_follows_from_the_format(row: dict[str, Any], expected: str) -> None:
    assert loss_on(section(), choose(row)) == expected
    assert loss_on(section(train_on="all"), choose(row)) == "all"


def test_a_list_of_messages_is_not_trained_on_as_python_prints_it() -> None:
    problem = refusal({"text": OPENAI})
    assert "column 'text' contains values of type list, not text" in problem.what
    assert "role" in problem.why
    assert "data.messages_field: text" in problem.fix
    assert "column of strings" in refusal({"text": ["a", "b"]}).fix


def test_dates_are_refused_because_their_text_was_lost() -> None:
    problem = refusal({"q": "x", "a": datetime.date(2020, 1, 1)}, prompt_template="{q} {a}")
    assert "column 'a'" in problem.what
    assert "read as dates" in problem.why


def test_a_single_row_with_a_list_is_a_problem_of_that_row() -> None:
    make = renderer(section(), choose({"text": "x"}), None)  # type: ignore[arg-type]
    with pytest.raises(RowProblem, match="'text' contains a list, not text"):
        make({"text": ["a"]})


def test_all_of_a_text_carries_loss() -> None:
    assert render({"text": "hello 👍"}) == Rendered("hello 👍", ((0, 7),))


def test_of_a_prompt_and_its_answer_only_the_answer_carries_loss() -> None:
    assert render({"q": "1+1", "a": 2}, prompt_template="{q} = {a}!") == Rendered("1+1 = 2!", ((6, 8),))
    assert render({"prompt": "1+1=", "completion": "2"}) == Rendered("1+1=2", ((4, 5),))
    assert render({"prompt": "1+1=", "completion": "2"}, train_on="all") == Rendered("1+1=2", ((0, 5),))


@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_a_row_without_an_answer_is_empty(answer: str | None) -> None:
    assert render({"prompt": "1+1=", "completion": answer}) == Rendered("", ())
    assert render({"q": "1+1", "a": answer}, prompt_template="{q} = {a}!") == Rendered("", ())


def test_an_empty_cell_of_the_prompt_is_an_empty_text() -> None:
    template = "{instruction}\n{input}\n{output}"
    row = {"instruction": "Name one.", "input": None, "output": "Two."}
    assert render(row, prompt_template=template) == Rendered("Name one.\n\nTwo.", ((11, 15),))
    assert render({**row, "input": math.nan}, prompt_template=template).text == "Name one.\n\nTwo."
    assert render({"prompt": None, "completion": "x"}) == Rendered("x", ((0, 1),))


def test_where_all_is_learnt_a_row_is_empty_when_all_its_cells_are() -> None:
    settings = {"prompt_template": "# {title}\n{body}", "train_on": "all"}
    assert render({"title": "A", "body": None}, **settings) == Rendered("# A\n", ((0, 4),))
    assert render({"title": None, "body": " "}, **settings) == Rendered("", ())


def test_text_asked_of_rows_that_hold_messages_is_answered_with_the_settings_for_chat() -> None:
    fix = refusal({"talk": OPENAI}, format="text").fix
    assert "set data.format: chat and data.messages_field: talk" in fix


def test_chat_asked_of_pairs_of_texts_is_answered_with_the_format_of_pairs() -> None:
    assert "Set data.format: prompt-completion" in str(refusal({"prompt": "Q", "completion": "A"}, format="chat").fix)


@pytest.mark.parametrize("row", [{"messages": OPENAI}, {"conversations": SHAREGPT}])
def test_the_recipe_for_chats_reads_what_its_comment_names(row: dict[str, Any]) -> None:
    recipe = REPOSITORY / "configs" / "instruction-chat.yaml"
    (column,) = row
    assert f"`{column}`" in recipe.read_text(encoding="utf-8")
    data = load_config(recipe, environ={}).config.data
    assert choose_format(data, list(row), [row]).name == "chat"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"messages_field": "talk", "text_field": "body"}, "not read: 'body', which data.text_field names (set data.format: text"),
        ({"format": "chat", "messages_field": "talk", "text_field": "body"}, "not read: 'body'"),
        ({"prompt_template": "{body}", "messages_field": "talk"}, "not read: 'talk', which data.messages_field names"),
        ({"format": "text", "messages_field": "talk", "text_field": "body"}, "not read: 'talk'"),
    ],
)  # fmt: skip
def test_a_column_that_a_setting_names_and_nothing_reads_is_told(settings: dict[str, Any], told: str) -> None:
    why = choose({"talk": OPENAI, "body": "x"}, **settings).why
    assert told in why
    assert why.count("not read") == 1


@pytest.mark.parametrize("settings", [{}, {"prompt_template": "{text}"}])
def test_a_renderer_can_be_sent_to_another_process(settings: dict[str, Any]) -> None:
    row = {"text": "x"}
    make = renderer(section(**settings), choose(row, **settings), None)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(make))(row) == make(row)
