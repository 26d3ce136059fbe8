from __future__ import annotations

import json
from typing import Any

import pytest

from shardtune.data.formats import RowProblem
from shardtune.data.messages import looks_like_messages, read_conversation

ASK = {"role": "user", "content": "Q"}


def read(*messages: Any, **others: Any) -> list[dict[str, Any]]:
    return read_conversation(list(messages), **others).messages


def test_the_openai_form_is_kept() -> None:
    messages = [ASK, {"role": "assistant", "content": "A", "reasoning_content": "Hm"}]
    assert read(*messages) == messages


def test_the_sharegpt_form_is_converted() -> None:
    row = [{"from": who, "value": "x"} for who in ("system", "human", "gpt", "observation", "gpt")]
    assert [m["role"] for m in read(*row)] == ["system", "user", "assistant", "tool", "assistant"]
    assert all(m == {"role": m["role"], "content": "x"} for m in read(*row))


def test_a_call_in_the_sharegpt_form_becomes_a_tool_call() -> None:
    [_, message] = read(
        {"from": "human", "value": "Q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    )
    assert message["role"] == "assistant"
    assert message["content"] == ""
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_a_system_prompt_in_its_own_column_comes_first_unless_there_is_one() -> None:
    assert read(ASK, system="S")[0] == {"role": "system", "content": "S"}
    assert read(ASK, system="  ") == [ASK]
    assert [m["content"] for m in read({"from": "system", "value": "own"}, ASK, system="S")] == ["own", "Q"]


def test_fields_that_are_null_are_not_there() -> None:
    assert read({"role": "user", "content": "Q", "tool_calls": None, "name": None}) == [ASK]
    assert read({"role": "assistant", "content": None, "tool_calls": []}) == [{"role": "assistant", "content": ""}]


def test_parts_of_text_are_joined_and_thinking_is_left_to_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}, "c"]
    assert read({"role": "user", "content": parts})[0]["content"] == "abc"
    thinking = [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "A"}]
    assert read({"role": "assistant", "content": thinking})[0]["content"] == thinking


@pytest.mark.parametrize("arguments", [{"x": 1, "y": None}, '{"x": 1}'])
def test_arguments_become_a_mapping_without_the_fields_that_arrow_adds(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = read({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_tools_are_read_from_a_list_or_from_json() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": None, "b": {"type": "string"}}}}]
    clean = [{"type": "function", "function": {"name": "f", "parameters": {"b": {"type": "string"}}}}]
    assert read_conversation([ASK], tools=tools).tools == clean
    assert read_conversation([ASK], tools=json.dumps(clean)).tools == clean
    assert read_conversation([ASK], tools=[json.dumps(clean[0])]).tools == clean
    for nothing in (None, [], "", "[]"):
        assert read_conversation([ASK], tools=nothing).tools is None


def test_messages_kept_as_json_text_are_read() -> None:
    assert read_conversation(json.dumps([ASK])).messages == [ASK]


def test_turns_of_a_prompt_and_of_weight_0_are_not_learnt() -> None:
    answer = {"role": "assistant", "content": "A"}
    read = read_conversation([answer, ASK, {**answer, "weight": 0}], prompt=[ASK, answer, ASK])
    assert read.unsupervised == {1, 5}
    assert read.messages == [ASK, answer, ASK, answer, ASK, answer]


def test_the_row_that_was_read_is_not_changed() -> None:
    row = [{"role": "assistant", "content": None, "weight": 0}, {"from": "human", "value": "Q"}]
    before = json.dumps(row)
    read_conversation(row)
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "no messages"),
        ("not json", "not JSON"),
        ({"role": "user"}, "a dict, not a list"),
        (["hello"], "message 1 is a str"),
        ([ASK, {"content": "x"}], "message 2 has no role"),
        ([{"from": "alien", "value": "x"}], "from 'alien', which is not one of human, user, gpt"),
        ([{"role": "user", "content": 7}], "content of message 1 is a int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url'; only text"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}], "no function name"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        ([{"from": "function_call", "value": "f(1)"}], "its value is not JSON"),
        ([{"role": "assistant", "content": "A", "weight": 0.5}], "weight 0.5"),
    ],
)
def test_what_is_no_conversation_is_told(value: Any, problem: str) -> None:
    with pytest.raises(RowProblem, match=problem):
        read_conversation(value)


@pytest.mark.parametrize("tools", ["{", ["{"], [3], {"name": "f"}])
def test_tools_that_are_no_schemas_are_told(tools: Any) -> None:
    with pytest.raises(RowProblem, match="tools"):
        read_conversation([ASK], tools=tools)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([ASK], True), (json.dumps([ASK]), True), ([{"from": "human", "value": "x"}], True),
        ("text", False), ('["a"]', False), ([], False), (["a"], False), ([{"a": 1}], False), (3, False), ({}, False),
    ],
)  # fmt: skip
def test_messages_are_told_from_other_values(value: Any, expected: bool) -> None:
    assert looks_like_messages(value) is expected
