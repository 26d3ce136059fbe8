"""Who said what? Conversations in the OpenAI and the ShareGPT form become one plain list of messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtune.data.formats import RowProblem

Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
# Those that chat templates know; what a message of another role says is rendered, if at all, and never learnt.
KNOWN_ROLES = (
    "system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment",
)  # fmt: skip
_CALLS = ("function_call", "tool_call")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row of a chat set, as templates want it.

    Attributes:
        messages: At least `role` and `content` each; no field is None.
        tools: JSON schemas of the functions on offer, or None.
        unsupervised: Numbers of assistant messages that carry no loss (`weight: 0`, or part of a prompt).
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unsupervised: frozenset[int] = frozenset()


def read_conversation(value: Any, *, system: Any = None, tools: Any = None, prompt: Any = None) -> Conversation:
    """Messages of one row.

    Args:
        value: The messages (a list, or the JSON text of one).
        system: System prompt that stands in a column of its own (ShareGPT sets).
        tools: Functions on offer (a list, or the JSON text of one).
        prompt: Messages that come before `value` and are not learnt, whoever said them.

    Raises:
        RowProblem: not a conversation.
    """
    entries = _entries(value, "the conversation")
    if not entries:
        raise RowProblem("the conversation has no messages")
    before = _entries(prompt, "the prompt") if prompt is not None else []
    messages = [_message(entry, number) for number, entry in enumerate([*before, *entries], start=1)]
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    asked = len(messages) - len(entries)
    unsupervised = {n for n, message in enumerate(messages) if n < asked and message["role"] == "assistant"}
    for number, message in enumerate(messages):
        if "weight" in message and _weight(message.pop("weight"), number + 1) == 0:
            unsupervised.add(number)
    return Conversation(messages, _tools(tools) if tools is not None else None, frozenset(unsupervised))


def looks_like_messages(value: Any) -> bool:
    """Is this the value of a chat column? (Also when it is kept as JSON text, as CSV files do.)"""
    try:
        entries = _entries(value, "")
    except RowProblem:
        return False
    return bool(entries) and all(isinstance(e, Mapping) and ("role" in e or "from" in e) for e in entries)


def roles(values: Iterable[Any]) -> list[str]:
    """Who speaks in these conversations, by the names that stand there; what is no conversation is passed over."""
    found = [entry for value in values if looks_like_messages(value) for entry in _entries(value, "")]
    return list(dict.fromkeys(str(entry.get("role") or entry.get("from")) for entry in found))


def _entries(value: Any, what: str) -> list[Any]:
    if isinstance(value, str):
        value = _from_json(value, f"{what} is text, and not JSON")
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, str):
        raise RowProblem(f"{what} is a {type(value).__name__}, not a list")
    return list(value)


def _from_json(text: Any, problem: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowProblem(f"{problem}: {error}") from error


def _message(entry: Any, number: int) -> Message:
    if not isinstance(entry, Mapping):
        raise RowProblem(f"message {number} is a {type(entry).__name__}, not a mapping with role and content")
    # Parquet and Arrow give every message every field of the file, most of them None.
    message = {key: value for key, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message, number)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        why = f"has the role {role!r}, which is not a string" if role else "has no role"
        raise RowProblem(f"message {number} {why} (its fields: {', '.join(map(str, entry))})")
    if message.get("tool_calls"):
        calls = _entries(message["tool_calls"], f"the field tool_calls of message {number}")
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    else:
        message.pop("tool_calls", None)
    if len(message) > 2 or not isinstance(message.get("content"), str):
        # Templates join strings: a missing content breaks more of them than an empty one.
        message["content"] = _content(message.get("content", ""), number)
    return message


def _from_sharegpt(message: Message, number: int) -> Message:
    said_by = message.pop("from")
    role = _SHAREGPT_ROLES.get(said_by) if isinstance(said_by, str) else None
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise RowProblem(f"message {number} is from {said_by!r}, which is not one of {known}")
    message |= {"role": role, "content": message.pop("value", "")}
    if said_by in _CALLS:
        calls = _from_json(message["content"], f"message {number} is a {said_by}, but its value is not JSON")
        message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message


def _content(content: Any, number: int) -> Any:
    """Text parts become one string; thinking parts are left for the template; images are refused."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):  # a tool's result
        return json.dumps(without_nulls(content), ensure_ascii=False)
    if not isinstance(content, Sequence):
        raise RowProblem(f"the content of message {number} is a {type(content).__name__}, not text")
    parts = [part if isinstance(part, str) else without_nulls(part) for part in content]
    kinds = ["text" if isinstance(p, str) else p.get("type") if isinstance(p, Mapping) else None for p in parts]
    foreign = [kind for kind in kinds if kind not in ("text", "thinking")]
    if foreign:
        raise RowProblem(f"the content of message {number} has a part of type {foreign[0]!r}; only text is supported")
    if "thinking" in kinds:
        return parts
    texts = [part if isinstance(part, str) else part.get("text", "") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowProblem(f"a text part of message {number} contains no text")
    return "".join(texts)


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """One call as `{"type": "function", "function": {"name", "arguments"}}`, the arguments as a mapping."""
    if not isinstance(call, Mapping):
        raise RowProblem(f"a tool call of message {number} is a {type(call).__name__}, not a mapping")
    call = without_nulls(call)
    function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else call
    if not isinstance(function.get("name"), str):
        raise RowProblem(f"a tool call of message {number} has no function name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        # OpenAI's own form. Templates write arguments with `tojson`, which would quote the text a second time.
        arguments = _from_json(arguments or "{}", f"the arguments of a tool call in message {number} are not JSON")
    kept = {"id": call["id"]} if "id" in call else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    entries = _entries(tools, "the tools column") if not isinstance(tools, str) or tools.strip() else []
    problem = "the tools column contains text that is not JSON"
    read = [_from_json(entry, problem) if isinstance(entry, str) else without_nulls(entry) for entry in entries]
    if not all(isinstance(entry, dict) for entry in read):
        raise RowProblem("the tools column contains something other than JSON schemas")
    return read or None


def _weight(weight: Any, number: int) -> int:
    if weight not in (0, 1):
        raise RowProblem(f"message {number} has the weight {weight!r}; only 0 (not supervised) and 1 are supported")
    return int(weight)


def without_nulls(value: Any) -> Any:
    """The same without None in mappings.

    Arrow gives every struct of a column the fields of all the others, set to None: a call of one function would be
    learnt with the arguments of every other. An argument that really is null goes with them.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
