"""Conversations as people have them: many languages, one turn or many, a system turn, an empty one, or none."""

from __future__ import annotations

from typing import Any

Message = dict[str, str]

_OPENINGS = [
    ("Was kostet die Überfahrt nach Amrum?", "29,40 € — hin und zurück, mit Fahrrad 38 €."),
    ("明日の天気は?", "晴れのち曇り、最高気温は二十三度です。"),
    ("Translate 'sea urchin' into Greek.", "αχινός"),
    ("x", "y"),
    ("Why does\nmy regex `^a{2,}$` not match?", "It needs at least *two* a's:\n\n```python\nre.match(r'^a{2,}$', 'aa')\n```"),
    ("🙂🙃 meaning?", "🙂 is a smile, 🙃 is irony. 👩‍👩‍👧 is one sign of three."),
    ("ما هي عاصمة المغرب؟", "الرباط"),
    ('{"task": "sum", "of": [1, 2]}', '{"result": 3}'),
]  # fmt: skip
_FOLLOW_UP = [("Are you sure?", "Yes: 100 %."), ("  And in short?  ", "No."), ("Danke schön!", "Gern geschehen …")]


def conversations(count: int, first: int = 0) -> list[list[Message]]:
    """That many, all different: every third has further turns, some a system turn, every eleventh is long."""
    return [_conversation(number) for number in range(first, first + count)]


def _conversation(number: int) -> list[Message]:
    asked, answer = _OPENINGS[number % len(_OPENINGS)]
    turns = [(f"{asked} ({number})", answer)]
    if number % 3 == 0:
        turns += _FOLLOW_UP[: 1 + number % len(_FOLLOW_UP)]
    if number % 11 == 10:
        turns.append(("Tell me everything.", " ".join(f"Point {point}: ça va?" for point in range(40))))
    messages = [{"role": "system", "content": "" if number % 8 else "Be brief. Прошу."}] if number % 4 == 0 else []
    for said, answered in turns:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
    return messages


def as_sharegpt(messages: list[Message]) -> dict[str, Any]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[each["role"]], "value": each["content"]} for each in messages]}
