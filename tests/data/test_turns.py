"""Each way of finding turns by itself: together they would hide each other's mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from chat_tokenizers import CHATML, LLAMA3, MISTRAL_V3, QWEN, chat_tokenizer, with_template
from test_chat import EXPECTED, PLAIN, TOOLS, Row, calling, chat, says

from shardtune.data.messages import read_conversation
from shardtune.data.turns import TurnFinder

ENDS = ("<|im_end|>", "<|eot_id|>", "</s>")
SILENT = CHATML.split("{%- if add_generation_prompt")[0]
CLOSING = CHATML + "{%- if not add_generation_prompt -%}{{- '<|endoftext|>' -}}{%- endif -%}"


def messages_of(row: Row) -> tuple[list[dict[str, Any]], Any]:
    read = read_conversation(row["messages"], tools=row.get("tools"))
    return read.messages, read.tools


def finder_of(family: str, template: str | None = None) -> TurnFinder:
    return chat(with_template(family, template) if template else chat_tokenizer(family)).finder


def texts(text: str, spans: list[tuple[int, int]] | None) -> list[str] | None:
    return None if spans is None else [text[start:end] for start, end in spans]


def said(turns: list[str] | None, messages: list[dict[str, Any]]) -> list[str] | None:
    """The turns that say something: empty ones are found as well, and left out later."""
    if turns is None:
        return None
    answers = [message for message in messages if message["role"] == "assistant"]
    return [
        turn
        for turn, message in zip(turns, answers, strict=True)
        if (message["content"].strip() or "tool_calls" in message) and turn not in ENDS
    ]


def by_roles(finder: TurnFinder, row: Row) -> list[str] | None:
    messages, tools = messages_of(row)
    text = finder.template.render(messages, tools)
    skeleton = finder.skeleton_of_roles([message["role"] for message in messages], tools)
    return said(texts(text, finder.read(text, messages, skeleton)), messages) if skeleton else None


def by_row(finder: TurnFinder, row: Row) -> list[str] | None:
    messages, tools = messages_of(row)
    text = finder.template.render(messages, tools)
    skeleton = finder.skeleton_of_row(messages, tools)
    return said(texts(text, finder.read(text, messages, skeleton)), messages) if skeleton else None


def by_prefixes(finder: TurnFinder, row: Row) -> list[str] | None:
    messages, tools = messages_of(row)
    text = finder.template.render(messages, tools)
    return said(texts(text, finder.by_prefixes(text, messages, tools)), messages)


@pytest.mark.parametrize(("family", "row", "expected"), EXPECTED)
def test_no_way_gives_another_answer_than_the_right_one(family: str, row: Row, expected: list[str]) -> None:
    finder = finder_of(family)
    for way in (by_roles, by_row, by_prefixes):
        assert way(finder, row) in (expected, None)


@pytest.mark.parametrize(
    ("family", "row", "expected"),
    [case for case in EXPECTED if case[0] != "mistral" or "tools" not in case[1]],
)
def test_one_skeleton_serves_all_rows_with_the_same_speakers(family: str, row: Row, expected: list[str]) -> None:
    """This is the fast way. (Only Mistral's template refuses a result that no call came before.)"""
    assert by_roles(finder_of(family), row) == expected


@pytest.mark.parametrize(
    ("family", "row", "expected"),
    [case for case in EXPECTED if "a: I begin" not in str(case) and case[1]["messages"][0]["role"] != "assistant"
     and "One" not in str(case[2])],
)  # fmt: skip
def test_a_row_is_its_own_skeleton(family: str, row: Row, expected: list[str]) -> None:
    assert by_row(finder_of(family), row) == expected


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_prefixes_are_read_where_they_are_stable(family: str) -> None:
    finder = finder_of(family)
    assert by_prefixes(finder, PLAIN) == by_roles(finder, PLAIN) != []


def test_prefixes_that_are_not_stable_give_no_answer() -> None:
    assert by_prefixes(finder_of("qwen"), PLAIN) is None  # an earlier turn has no thinking block
    assert by_prefixes(finder_of("mistral_v3"), says("s: S", "u: Q", "a: A", "u: R", "a: B")) is None
    assert by_prefixes(finder_of("chatml"), says("a: I begin.", "u: Fine")) is None


# ---- what is needed by one way only -------------------------------------------------------------------------------------


def test_a_strict_template_that_moves_the_system_prompt_is_read_by_the_row_alone() -> None:
    strict = MISTRAL_V3.replace(
        "{{- ' ' + message['content'] | trim + eos_token -}}",
        "{%- if message.tool_calls -%}{{- '[TOOL_CALLS]' + (message.tool_calls | tojson) + eos_token -}}{%- else -%}{{- ' ' + message['content'] | trim + eos_token -}}{%- endif -%}"
        "{%- elif message['role'] == 'tool' -%}{%- if not loop.previtem.tool_calls -%}{{- raise_exception('no call') -}}{%- endif -%}{{- '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' -}}",
    )
    row = calling("s: S", "u: Q", "a: ", "t: blue", "a: Blue.", "u: R", "a: B")
    finder = finder_of("mistral_v3", strict)
    assert by_roles(finder, row) is None
    assert by_prefixes(finder, row) is None
    found = by_row(finder, row)
    assert found is not None
    assert found[0].startswith('[TOOL_CALLS][{"id": "call00001"')
    assert found[0].endswith("}]</s>")
    assert found[1:] == [" Blue.</s>", " B</s>"]
    rendered = chat(with_template("mistral_v3", strict))(row)
    assert texts(rendered.text, list(rendered.spans)) == found


def test_a_template_that_looks_at_what_is_asked_is_read_by_prefixes_alone() -> None:
    looking = CHATML.replace("message['role'] + '\\n'", "message['role'] + (' (json)' if 'json' in message['content'] else '') + '\\n'")  # fmt: skip
    row = says("u: as json", "a: {}", "u: json too", "a: []")
    finder = finder_of("chatml", looking)
    assert by_roles(finder, row) is None
    assert by_row(finder, row) is None
    assert by_prefixes(finder, row) == ["{}<|im_end|>", "[]<|im_end|>"]
    rendered = chat(with_template("chatml", looking))({**row, "tools": None})
    assert texts(rendered.text, list(rendered.spans)) == ["{}<|im_end|>", "[]<|im_end|>"]


def test_turns_with_calls_may_end_with_another_token() -> None:
    other = LLAMA3.replace("{{- '}<|eot_id|>' -}}", "{{- '}<|end_of_text|>' -}}")
    row = calling("u: Q", "a: ", "t: blue", "a: A")
    call = '{"name": "weather", "parameters": {"city": "Paris"}}<|end_of_text|>'
    assert by_row(finder_of("llama3", other), row) == [call, "A<|eot_id|>"]
    assert by_prefixes(finder_of("llama3", other), row) == [call, "A<|eot_id|>"]


@pytest.mark.parametrize("way", [by_roles, by_row, by_prefixes])
def test_the_header_of_a_template_without_a_generation_prompt_is_left_out(way: Any) -> None:
    assert way(finder_of("chatml", SILENT), PLAIN) == ["Forty two.<|im_end|>", "Yes.<|im_end|>"]


def test_a_header_that_is_not_the_known_one_is_not_taken_for_something_said() -> None:
    """Without a generation prompt there is no telling where the second header ends."""
    changing = SILENT.replace("'<|im_start|>' + message['role']", "'<|im_start|>' + message['role'] + ('' if loop.index < 3 else ' again')")  # fmt: skip
    finder = finder_of("chatml", changing)
    assert by_row(finder, PLAIN) is None
    assert by_prefixes(finder, PLAIN) is None
    assert by_roles(finder, PLAIN) == ["Forty two.<|im_end|>", "Yes.<|im_end|>"]


@pytest.mark.parametrize("way", [by_row, by_prefixes])
def test_a_generation_prompt_that_is_missing_after_a_tool_is_found_all_the_same(way: Any) -> None:
    quiet = QWEN.replace("{%- if add_generation_prompt -%}", "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}")  # fmt: skip
    row = calling("u: Q", "a: Wait.", "t: blue", "a: A")
    call = 'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    if way is by_prefixes:  # whose last turns all have a thinking block in Qwen's own template
        quiet = quiet.replace("(loop.last or reasoning_content)", "reasoning_content")
        assert way(finder_of("qwen", quiet), row) == [call, "A<|im_end|>"]
    else:
        assert way(finder_of("qwen", quiet), row) == [call, "<think>\n\n</think>\n\nA<|im_end|>"]


@pytest.mark.parametrize("way", [by_roles, by_row, by_prefixes])
def test_the_end_of_the_chat_is_not_the_end_of_the_turn(way: Any) -> None:
    assert way(finder_of("chatml", CLOSING), says("u: Q", "a: A")) == ["A<|im_end|>"]


def test_a_header_does_not_end_inside_a_token() -> None:
    """The generation prompt opens the thinking, a turn of the past begins with its end: both start with `<`."""
    closed = QWEN.replace("{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>assistant\\n<think>' -}}").replace(
        "{{- '<|im_start|>' + message.role + '\\n' + content -}}", "{{- '<|im_start|>' + message.role + '\\n</think>' + content -}}"
    )  # fmt: skip
    found = by_roles(finder_of("qwen", closed), PLAIN)
    assert found == ["</think>Forty two.<|im_end|>", "\n\n</think>\n\nYes.<|im_end|>"]


def test_what_others_say_may_be_repeated_or_left_out() -> None:
    twice = "{{- messages[0].content + '\\n' -}}" + CHATML
    assert by_roles(finder_of("chatml", twice), PLAIN) == ["Forty two.<|im_end|>", "Yes.<|im_end|>"]
    deaf = CHATML.replace("{{- '<|im_start|>' +", "{%- if message['role'] == 'system' -%}{%- continue -%}{%- endif -%}{{- '<|im_start|>' +")  # fmt: skip
    assert by_roles(finder_of("chatml", deaf), says("s: S", "u: Q", "a: A")) == ["A<|im_end|>"]


@pytest.mark.parametrize("template", ["{{- messages[1].content if messages | length > 1 -}}" + CHATML])
def test_a_turn_that_is_written_twice_gives_no_answer(template: str) -> None:
    finder = TurnFinder(chat(with_template("chatml", CHATML)).template, chat(chat_tokenizer("chatml")).finder.added)
    made = chat(with_template("chatml", template), train_on="all").template
    doubled = TurnFinder(made, finder.added)
    assert by_roles(finder, PLAIN) is not None
    assert by_roles(doubled, PLAIN) is None


# ---- texts that are not what the skeleton says ---------------------------------------------------------------------------


def chatml_skeleton(row: Row, *, whole: bool = False) -> tuple[TurnFinder, list[dict[str, Any]], Any, str]:
    finder = finder_of("chatml")
    messages, _ = messages_of(row)
    skeleton = (
        finder.skeleton_of_row(messages, None)
        if whole
        else finder.skeleton_of_roles([message["role"] for message in messages], None)
    )
    assert skeleton is not None
    return finder, messages, skeleton, finder.template.render(messages, None)


def test_a_text_with_a_turn_too_many_gives_no_answer() -> None:
    finder, messages, skeleton, text = chatml_skeleton(says("u: Q", "a: A", "u: Q", "a: B"))
    extra = "A<|im_end|>\n<|im_start|>user\nX<|im_end|>\n<|im_start|>assistant\nY<|im_end|>"
    assert finder.read(text, messages, skeleton) is not None
    assert finder.read(text.replace("A<|im_end|>", extra), messages, skeleton) is None
    assert finder.read(text.replace("B<|im_end|>", extra), messages, skeleton) is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_text_that_differs_anywhere_else_gives_no_answer(whole: bool) -> None:
    finder, messages, skeleton, text = chatml_skeleton(says("s: S", "u: Q", "a: A", "u: R"), whole=whole)
    assert texts(text, finder.read(text, messages, skeleton)) == ["A<|im_end|>"]
    for at in [n for n, sign in enumerate(text) if sign != "A"]:
        changed = f"{text[:at]}#{text[at + 1 :]}"
        assert finder.read(changed, messages, skeleton) is None, changed
    for changed in (text + "#", "#" + text, text[:-1], text[1:], text + text):
        assert finder.read(changed, messages, skeleton) is None


def test_a_row_that_is_its_own_skeleton_is_not_searched_for() -> None:
    finder, messages, skeleton, text = chatml_skeleton(says("u: Q", "a: A", "u: Q", "a: B"), whole=True)
    assert finder.read(text.replace("assistant\nA", "assistant\nC A"), messages, skeleton) is None


def test_nobody_but_the_user_speaks() -> None:
    finder, messages, skeleton, text = chatml_skeleton(says("u: Q", "u: R"))
    assert finder.read(text, messages, skeleton) == []
    assert finder.read(text + "#", messages, skeleton) is None


def test_tools_are_part_of_what_a_skeleton_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    make = chat(chat_tokenizer("qwen"))
    monkeypatch.setattr(TurnFinder, "skeleton_of_row", lambda *_: None)
    monkeypatch.setattr(TurnFinder, "by_prefixes", lambda *_: None)
    for tools in (TOOLS, None, [{"type": "function", "function": {"name": "other"}}], TOOLS):
        rendered = make({**PLAIN, "tools": tools})
        assert len(rendered.spans) == 2
