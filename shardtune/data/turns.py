"""Where in a rendered chat does the assistant speak? Found in the template's own output, and proven, or not answered.

Most chat templates carry no `{% generation %}` marks. What they write around a message can be seen by giving them
messages that can be recognised in the output:

1. A *skeleton* is the rendering of a conversation whose contents are placeholders: literal text, and slots between.
   It depends on the roles alone, so one serves all rows with the same order of speakers. Where the assistant's turn
   starts in it is seen by rendering the conversation up to there with the generation prompt; where it ends, by
   rendering it with that turn as the last.
2. A row's own rendering is then read against the skeleton. Everything the assistant did not say has to match it to
   the character. What the assistant said is usually the content as it stands; a template may also rewrite it (Qwen3
   drops the thinking of earlier turns), and then it is what stands between its two fixed neighbours.
3. Where that fails (a template that looks at what is said), the skeleton is made from the row itself, with placeholders
   only for what the assistant did not say; then by rendering prefixes of the conversation.

Whatever cannot be matched has no answer: a wrong mask trains silently on the wrong text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardtune.data.formats import RowProblem
from shardtune.data.messages import Message

Span = tuple[int, int]
Tools = list[dict[str, Any]] | None

# Around placeholders stands a space that `trim` takes away and nothing else; a quote shows whether JSON was written.
_PAD = "\u2003"


class Renders(Protocol):
    """A chat template."""

    def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        """The text; with `prompt`, up to and including what makes the assistant speak. Raises RowProblem."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """A content in a skeleton.

    Attributes:
        before: Literal text between the content before this one and this one.
        message: Number of the message.
        assistant: Whether the assistant says it.
        trim_left, trim_right, escaped: How the template writes a content.
        lead: Assistant only: how many characters at the end of `before` it generates (an empty `<think>` block).
        tail: Assistant only: how many characters after the content belong to its turn (the end-of-turn token).
        whole: Assistant only: the turn stands in the literal text after the slot, and nothing is filled in.
    """

    before: str
    message: int
    assistant: bool
    trim_left: bool = False
    trim_right: bool = False
    escaped: bool = False
    lead: int = 0
    tail: int = 0
    whole: bool = False

    def written(self, content: str) -> str:
        if self.whole:
            return ""
        if self.trim_left or self.trim_right:
            content = content.lstrip() if self.trim_left else content
            content = content.rstrip() if self.trim_right else content
        return json.dumps(content, ensure_ascii=False)[1:-1] if self.escaped else content


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What a template writes around the contents of a conversation; `rest` is what follows the last of them."""

    slots: tuple[Slot, ...]
    rest: str

    def fixed(self, messages: Sequence[Message]) -> list[str] | None:
        """The text between the assistant's turns, of which there is one more than turns. None: a content is no text."""
        fixed, current = [], ""
        for slot in self.slots:
            if slot.assistant:
                fixed.append(current + slot.before[: len(slot.before) - slot.lead])
                current = ""
                continue
            content = messages[slot.message]["content"]
            if not isinstance(content, str):
                return None
            current += slot.before + slot.written(content)
        fixed.append(current + self.rest)
        return fixed


def added_tokens_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the tokens that are cut out of a text before it is tokenised."""
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@dataclass(frozen=True)
class TurnFinder:
    """Finds the assistant's turns in what a template rendered.

    Attributes:
        template: Renders conversations.
        added: Matches the tokenizer's added tokens.
        end_of_turn: What the template writes after every turn of the assistant; empty when not known yet.
        end_of_chat: What it writes after the last one: the same, or another token (gpt-oss).
        boundaries: Added tokens that separate turns: no content may hold them.
        opening: What the template writes before a turn of the assistant that follows the user.
        prompts: Whether it writes that when asked for a generation prompt (some know none).
    """

    template: Renders
    added: re.Pattern[str]
    end_of_turn: str = ""
    end_of_chat: str = ""
    boundaries: tuple[str, ...] = ()
    opening: str = ""
    prompts: bool = True

    # ---- reading a row -------------------------------------------------------------------------------------------

    def read(self, text: str, messages: Sequence[Message], skeleton: Skeleton) -> list[Span] | None:
        """The assistant's turns in `text`, or None if `text` is not the skeleton filled with these messages."""
        fixed = skeleton.fixed(messages)
        if fixed is None or not text.startswith(fixed[0]):
            return None
        spans: list[Span] = []
        start = len(fixed[0])
        turns = [slot for slot in skeleton.slots if slot.assistant]
        for number, (slot, behind) in enumerate(zip(turns, fixed[1:], strict=True), start=1):
            said = slot.before[len(slot.before) - slot.lead :] + _said(slot, messages)
            end = start + len(said)
            last = number == len(turns)
            exact = text.startswith(said, start) and text.startswith(behind, end)
            if not exact or (last and end + len(behind) != len(text)):
                found = None if slot.whole else self._search(text, start, behind, slot.tail, last=last)
                if found is None:
                    return None
                end = found
            spans.append((start, end + slot.tail))
            start = end + len(behind)
        return spans if start == len(text) else None

    def _search(self, text: str, start: int, behind: str, tail: int, *, last: bool) -> int | None:
        """Where a turn ends that the template rewrote: before the first place that is what has to follow."""
        if not behind:
            return len(text)
        end = len(text) - len(behind) if last else text.find(behind, start)
        if end < start or not text.startswith(behind, end):
            return None
        if any(token in text[start:end] for token in self.boundaries):
            return None
        if not last and not self.added.search(behind[:tail]) and text.find(behind, end + 1) != -1:
            return None  # plain words as delimiters, and the assistant may have said them
        return end

    # ---- making skeletons ----------------------------------------------------------------------------------------

    def skeleton_of_roles(self, roles: Sequence[str], tools: Tools) -> Skeleton | None:
        """The skeleton of all plain conversations with these speakers; None if the template does not show one."""
        messages = [{"role": role, "content": _placeholder(number)} for number, role in enumerate(roles)]
        return self._skeleton(messages, tools, whole=False)

    def skeleton_of_row(self, messages: Sequence[Message], tools: Tools) -> Skeleton | None:
        """A skeleton with the assistant's turns as they are and placeholders for what others say."""
        replaced = [
            {**message, "content": _placeholder(number)}
            if message["role"] != "assistant" and isinstance(message["content"], str)
            else message
            for number, message in enumerate(messages)
        ]
        return self._skeleton(replaced, tools, whole=True)

    def _skeleton(self, messages: Sequence[Message], tools: Tools, *, whole: bool) -> Skeleton | None:
        try:
            text = self.template.render(messages, tools)
            slots, rest = self._slots(text, messages, tools, whole=whole)
        except (RowProblem, _NotShown):
            return None
        return Skeleton(slots, rest)

    def _slots(
        self, text: str, messages: Sequence[Message], tools: Tools, *, whole: bool
    ) -> tuple[tuple[Slot, ...], str]:
        places = _places(text, messages, whole=whole)
        slots: list[Slot] = []
        done = 0  # up to here, `text` stands in slots
        for index, place in enumerate(places):
            following = places[index + 1].start if index + 1 < len(places) else len(text)
            assistant = messages[place.message]["role"] == "assistant"
            if not whole and assistant:
                gap = text[done : place.start]
                lead = len(gap) - self._header(gap, messages, tools, place.message)
                tail = self._end(text[place.end : following], messages, tools, place.message)
                slots.append(_slot(place, gap, assistant=True, lead=lead, tail=tail))
            else:
                slots.append(_slot(place, text[done : place.start], assistant=False))
            done = place.end
            follower = place.message + 1
            if whole and follower < len(messages) and messages[follower]["role"] == "assistant":
                header, tail = self._whole_turn(text[done:following], messages, tools, follower)
                slots.append(Slot(text[done : done + header], follower, assistant=True, tail=tail, whole=True))
                done += header
        found = sum(slot.assistant for slot in slots)
        if found != sum(message["role"] == "assistant" for message in messages):
            raise _NotShown
        return tuple(slots), text[done:]

    def _header(self, gap: str, messages: Sequence[Message], tools: Tools, turn: int) -> int:
        """How much of the text before a turn is written for the assistant rather than by it."""
        if turn == 0:
            return len(gap)  # there is no conversation before it to render
        prompted = _behind_last_place(self.template.render(messages[:turn], tools, prompt=True))
        plain = _behind_last_place(self.template.render(messages[:turn], tools))
        if prompted == plain and gap.startswith(plain) and gap[len(plain) :].strip():
            return len(gap)  # the template knows no generation prompt, so this is its header
        header = self._up_to_token(gap, _shared(gap, prompted))
        # A generation prompt may open a thinking block that turns of the past do not have; its header has to be there.
        own = _shared(plain, prompted)
        if header < own or (header == own and len(prompted) > own):
            raise _NotShown
        return header

    def _end(self, gap: str, messages: Sequence[Message], tools: Tools, turn: int) -> int:
        """How much of the text after a turn's content ends the turn: up to and with the end-of-turn token."""
        if self.end_of_turn and gap.startswith(self.end_of_turn):
            return len(self.end_of_turn)  # saves a rendering
        last = _behind_last_place(self.template.render(messages[: turn + 1], tools))
        always = gap[: self._up_to_token(gap, _shared(gap, last))]
        if not always and last.strip():
            # gpt-oss ends the last turn with another token than those before it.
            token = self.added.match(gap)
            return token.end() if token else 0
        return self._turn_length(always)

    def _whole_turn(self, gap: str, messages: Sequence[Message], tools: Tools, turn: int) -> tuple[int, int]:
        """(header, body with end-of-turn token) lengths in the text between two placeholders."""
        prompted = _behind_last_place(self.template.render(messages[:turn], tools, prompt=True))
        plain = _behind_last_place(self.template.render(messages[:turn], tools))
        header = self._opened(gap, prompted, plain)
        if header is None:
            raise _NotShown
        as_last = _behind_last_place(self.template.render(messages[: turn + 1], tools))
        if gap.startswith(as_last) and len(as_last) > header:
            return header, self._turn_length(as_last[header:])
        end = gap.find(self.end_of_turn, header) if self.added.search(self.end_of_turn) else -1
        if end < 0:
            raise _NotShown
        return header, end + len(self.end_of_turn) - header

    def _opened(self, text: str, prompted: str, plain: str) -> int | None:
        """Where in `text` the turn after `prompted` starts; None if that is not how `text` begins."""
        if prompted != plain:
            return len(prompted) if text.startswith(prompted) else None
        # No generation prompt, at least not here (Gemma 4 after a tool's result); the header may still be there.
        if text.startswith(plain + self.opening):
            return len(plain + self.opening)
        return len(plain) if self.prompts and text.startswith(plain) else None

    def _up_to_token(self, text: str, cut: int) -> int:
        """`cut`, or the start of the added token it would go through (`<think>` and `</think>` start alike)."""
        return next((m.start() for m in self.added.finditer(text) if m.start() < cut < m.end()), cut)

    def _turn_length(self, text: str) -> int:
        """How much of what follows a header, rendered as the last turn, is the turn: no blank, no end of the chat."""
        at = text.rfind(self.end_of_turn) if self.end_of_turn else -1
        if at >= 0 and not self.added.sub("", text[at + len(self.end_of_turn) :]).strip():
            return at + len(self.end_of_turn)  # Phi-3 writes an end of text behind the end of the last turn
        return len(text.rstrip())

    # ---- the last resort -----------------------------------------------------------------------------------------

    def by_prefixes(self, text: str, messages: Sequence[Message], tools: Tools) -> list[Span] | None:
        """The turns, where rendering the conversation up to each of them gives the beginning of the whole."""
        spans = []
        try:
            for number, message in enumerate(messages):
                if message["role"] != "assistant" or number == 0:
                    continue
                prompted, plain = (self.template.render(messages[:number], tools, prompt=p) for p in (True, False))
                as_last = self.template.render(messages[: number + 1], tools)
                start = self._opened(as_last, prompted, plain)
                if start is None or not text.startswith(as_last):
                    return None
                spans.append((start, start + self._turn_length(as_last[start:])))
        except RowProblem:
            return None
        return spans if messages[0]["role"] != "assistant" else None


class _NotShown(Exception):
    """The rendering does not show where a turn stands."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A placeholder found in a rendering, with the padding that was left to it."""

    message: int
    start: int
    end: int
    trim_left: bool
    trim_right: bool
    escaped: bool


_PLACEHOLDER = re.compile(f'({_PAD}?)\ue000(\\d+)(\\\\?)"\ue001({_PAD}?)')


def _placeholder(number: int) -> str:
    return f'{_PAD}\ue000{number}"\ue001{_PAD}'


def _places(text: str, messages: Sequence[Message], *, whole: bool) -> list[_Place]:
    found = [
        _Place(int(m[2]), m.start(), m.end(), trim_left=not m[1], trim_right=not m[4], escaped=bool(m[3]))
        for m in _PLACEHOLDER.finditer(text)
    ]
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    # A template may leave out, move or repeat what others say (a system prompt), but none of the assistant's turns.
    if not whole and [place.message for place in found if place.message in turns] != turns:
        raise _NotShown
    return found


def _slot(place: _Place, before: str, *, assistant: bool, lead: int = 0, tail: int = 0) -> Slot:
    return Slot(before, place.message, assistant, place.trim_left, place.trim_right, place.escaped, lead, tail)


def _behind_last_place(text: str) -> str:
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        end = match.end()
    if not end:
        raise _NotShown
    return text[end:]


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _said(slot: Slot, messages: Sequence[Message]) -> str:
    content = messages[slot.message]["content"]
    return slot.written(content) if isinstance(content, str) else ""
