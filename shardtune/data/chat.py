"""How does a conversation become text, and which part of it did the assistant say?"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.config.schema import DataSection
from shardtune.data.formats import FormatChoice, LossOn, Rendered, RowProblem, RowRemark, loss_on
from shardtune.data.messages import KNOWN_ROLES, Conversation, Message, read_conversation
from shardtune.data.turns import Renders, Skeleton, Span, Tools, TurnFinder, added_tokens_pattern
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BUILT_IN = ("chatml", "llama3", "mistral", "qwen")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = re.compile("think|thought|reason", re.IGNORECASE)
_KEPT_SKELETONS = 2048  # a few kilobytes each; tools that differ in every row would otherwise fill the memory
_FIX = (
    f"Set data.chat_template to one of {', '.join(BUILT_IN)}, or to a copy of the template with {{% generation %}} … "
    "{% endgeneration %} around the assistant's text and its end-of-turn token; or set data.train_on: all."
)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template with the tokens it may name. Rendered as `tokenizer.apply_chat_template` does.

    Attributes:
        source: The template.
        tool_source: The one for rows with tools (some tokenizers have two).
        variables: `bos_token`, `eos_token` and so on.
        name: What to call it in messages.
        text_arguments: The template wants a tool call's arguments as JSON text, not as a mapping.
    """

    source: str
    tool_source: str
    variables: Mapping[str, Any]
    name: str
    text_arguments: bool = False

    def render(self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False) -> str:
        return self._render(messages, tools, prompt=prompt)[0]

    def render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The text and the character ranges inside `{% generation %}` marks."""
        return self._render(messages, tools, marks=True)

    def _render(
        self, messages: Sequence[Message], tools: Tools, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        schemas: list[Any] | None = tools
        try:
            rendered: Any = render_jinja_template(
                conversations=[self._arguments(messages)],
                tools=schemas,
                chat_template=self.tool_source if tools else self.source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RowProblem(f"{self.name} rejects it: {error}") from error
        texts, indices = rendered
        return texts[0], indices[0] if marks else []

    def _arguments(self, messages: Sequence[Message]) -> list[Message]:
        if not self.text_arguments or not any("tool_calls" in message for message in messages):
            return list(messages)
        return [
            {**message, "tool_calls": [_text_arguments(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ]


def _text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


@dataclass(frozen=True)
class ChatRenderer:
    """Rows of messages as text, with the assistant's turns marked: what it says and the token that ends the turn.

    Attributes:
        template: The chat template.
        finder: Finds turns in its output.
        columns: Columns of the row: messages (or prompt and completion), and `system`, `tools` where the set has them.
        loss: Which turns carry loss.
        marked: The template's own marks are used.
    """

    template: ChatTemplate
    finder: TurnFinder
    columns: tuple[str, ...]
    loss: LossOn
    marked: bool
    _skeletons: dict[tuple[Any, ...], Skeleton | None] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, row: Mapping[str, Any]) -> Rendered:
        conversation = self._conversation(row)
        if conversation is None:
            return Rendered("", (), special=True)
        self.refuse_boundaries(conversation.messages)
        if self.loss == "all":
            text = self.template.render(conversation.messages, conversation.tools)
            return Rendered(text, ((0, len(text)),), special=True, remarks=_remarks(conversation, text))
        text, turns = self._marked_turns(conversation) if self.marked else self._found_turns(conversation)
        spans: list[Span] = []
        remarks = set(_unknown_roles(conversation))
        for (start, end), message in self._learnt(turns, conversation):
            turn = text[start:end]
            empty = self._is_empty(turn, message)
            if not empty:
                spans.append((start, end))
            if message is not None and _loses_calls(message, turn):
                remarks.add(RowRemark("lost tool calls"))
            elif empty:
                remarks.add(RowRemark("empty turn"))
        return Rendered(text, tuple(spans), special=True, remarks=frozenset(remarks))

    def _conversation(self, row: Mapping[str, Any]) -> Conversation | None:
        pair = self.columns[0] == "prompt"
        value = row["completion" if pair else self.columns[0]]
        if value is None or (pair and row["prompt"] is None):
            return None  # an empty row
        tools = row["tools"] if "tools" in self.columns else None
        system = row["system"] if "system" in self.columns else None
        read = read_conversation(value, system=system, tools=tools, prompt=row["prompt"] if pair else None)
        # `assistant` asks for all of its turns, those of the prompt too.
        return replace(read, unsupervised=frozenset()) if pair and self.loss == "assistant" else read

    def refuse_boundaries(self, messages: Sequence[Message]) -> None:
        """Raise RowProblem for a message that contains a token which separates turns."""
        for number, message in enumerate(messages, start=1):
            content = message["content"]
            plain = len(message) == 2 and isinstance(content, str)
            said = content if plain else json.dumps(message, ensure_ascii=False, default=str)
            for token in self.finder.boundaries:
                if token in said:
                    raise RowProblem(
                        f"message {number} ({message['role']}) contains {token}, which would be read as the token that "
                        "separates turns; remove it or write it differently"
                    )

    def _found_turns(self, conversation: Conversation) -> tuple[str, list[Span]]:
        messages, tools = conversation.messages, conversation.tools
        text = self.template.render(messages, tools)
        shared = self._shared_skeleton(messages, tools)
        turns = self.finder.read(text, messages, shared) if shared is not None else None
        if turns is None:
            own = self.finder.skeleton_of_row(messages, tools)
            turns = self.finder.read(text, messages, own) if own is not None else None
        if turns is None:
            turns = self.finder.by_prefixes(text, messages, tools)
        if turns is None:
            roles = ", ".join(message["role"] for message in messages)
            raise RowProblem(
                f"{self.template.name} does not show which part of this conversation is the assistant's "
                f"(roles: {roles}); use one with {{% generation %}} marks (data.chat_template)"
            )
        return text, turns

    def _shared_skeleton(self, messages: Sequence[Message], tools: Tools) -> Skeleton | None:
        roles = tuple(message["role"] for message in messages)
        key = (roles, json.dumps(tools) if tools else None)
        if key not in self._skeletons:
            if len(self._skeletons) >= _KEPT_SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = self.finder.skeleton_of_roles(roles, tools)
        return self._skeletons[key]

    def _marked_turns(self, conversation: Conversation) -> tuple[str, list[Span]]:
        text, marks = self.template.render_marked(conversation.messages, conversation.tools)
        turns = [with_end_of_turn(text, mark, self.finder.end_of_turn) for mark in marks]
        said = sum(message["role"] == "assistant" for message in conversation.messages)
        if conversation.unsupervised and len(turns) != said:
            raise RowProblem(
                f"{self.template.name} marks {len(turns)} parts of a conversation with {said} assistant turns, so it "
                "is unknown which of them are not supervised"
            )
        return text, turns

    def _learnt(self, turns: Sequence[Span], conversation: Conversation) -> list[tuple[Span, Message | None]]:
        """The turns that are to be learnt, each with its message; None where marks do not show which that is."""
        said = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(turns) != len(said):
            return [(turn, None) for turn in turns]
        learnt = [(n, turn) for n, turn in zip(said, turns, strict=True) if n not in conversation.unsupervised]
        return [(turn, conversation.messages[n]) for n, turn in learnt]

    def _is_empty(self, turn: str, message: Message | None) -> bool:
        """Is a turn nothing but its end? Learnt, that would teach the model to say nothing."""
        body = turn.rstrip().removesuffix(self.finder.end_of_turn)
        if message is not None and _says_nothing(message):
            body = self.finder.added.sub("", body)  # a thinking block without thoughts, another end of the last turn
        return not body.strip()


def _says_nothing(message: Message) -> bool:
    return isinstance(message["content"], str) and not message["content"].strip()


def _loses_calls(message: Message, turn: str) -> bool:
    return any(call["function"]["name"] not in turn for call in message.get("tool_calls", ()))


def _unknown_roles(conversation: Conversation) -> Iterator[RowRemark]:
    for message in conversation.messages:
        if message["role"] not in KNOWN_ROLES:
            yield RowRemark("unknown role", message["role"])


def _remarks(conversation: Conversation, text: str) -> frozenset[RowRemark]:
    """Where all is learnt and nobody looks for turns: by the messages, and the text as a whole."""
    found = set(_unknown_roles(conversation))
    for message in conversation.messages:
        if message["role"] == "assistant" and _loses_calls(message, text):
            found.add(RowRemark("lost tool calls"))
        elif message["role"] == "assistant" and _says_nothing(message) and len(message) == 2:
            found.add(RowRemark("empty turn"))
    return frozenset(found)


def with_end_of_turn(text: str, mark: Span, end_of_turn: str) -> Span:
    """A marked range up to the end-of-turn token: templates may mark the content alone, or a blank too much."""
    start, end = mark
    if not end_of_turn:
        return mark
    if text[start:end].rstrip().endswith(end_of_turn):
        return start, start + len(text[start:end].rstrip())
    return start, end + len(end_of_turn) if text.startswith(end_of_turn, end) else end


def chat_renderer(section: DataSection, choice: FormatChoice, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    """The renderer of a chat set, after the template was tried on a small conversation.

    Raises:
        UserInputError: no template, a template that does not compile, or one in whose output the assistant's turns
            cannot be found (not checked when all is supervised).
    """
    template = load_template(section, tokenizer)
    loss = loss_on(section, choice)
    added = _added_tokens(tokenizer)
    finder = _with_turn_markers(TurnFinder(template, added_tokens_pattern(added)), tokenizer)
    template = replace(template, text_arguments=_wants_text_arguments(template))
    finder = replace(finder, template=template)
    _check_built_in(section, finder, added)
    chat = ChatRenderer(template, finder, choice.columns, loss, marked=_marks_hold(template))
    if loss != "all" and not chat.marked:
        _check_turns_are_found(chat)
    return chat


def load_template(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """`data.chat_template`, or else the tokenizer's own.

    Raises:
        UserInputError: there is none, or it does not compile.
    """
    asked = section.chat_template
    if asked is not None:
        source = tool_source = read_template(asked)
        name = f"the chat template '{asked}'"
    elif tokenizer.chat_template:
        source = tokenizer.get_chat_template(None)
        tool_source = tokenizer.get_chat_template(None, tools=[{"type": "function"}])
        name = "the tokenizer's chat template"
    else:
        raise UserInputError(
            "The data are conversations, but the tokenizer has no chat template.",
            why="A base model does not define how a conversation is rendered.",
            fix=f"Set data.chat_template to a .jinja file or to one of {', '.join(BUILT_IN)}.",
        )
    _check_syntax({source, tool_source}, name)
    return ChatTemplate(source, tool_source, dict(tokenizer.special_tokens_map), name)


def read_template(asked: str) -> str:
    """The source of `data.chat_template`.

    Raises:
        UserInputError: it is neither a built-in name nor a file that can be read.
    """
    if asked in BUILT_IN:
        return (resources.files("shardtune.data") / "chat_templates" / f"{asked}.jinja").read_text(encoding="utf-8")
    path = Path(asked).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(
            f"Cannot read the chat template '{asked}'.",
            why=f"It is not a built-in name, and as a file: {error}",
            fix=f"Set data.chat_template to a .jinja file or to one of {', '.join(BUILT_IN)}.",
        ) from error


def _check_syntax(sources: set[str], name: str) -> None:
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    for source in sources:
        try:  # the compiled template is cached; nothing is said, so what it raises about messages does not count
            render_jinja_template(conversations=[], chat_template=source)
        except TemplateError as error:
            raise UserInputError(
                f"{name[0].upper()}{name[1:]} does not compile.",
                why=str(error),
                fix="Fix it, or set data.chat_template.",
            ) from error


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Tokens that are cut out of a text as they stand."""
    return list(dict.fromkeys([*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens]))


def _with_turn_markers(finder: TurnFinder, tokenizer: PreTrainedTokenizerBase) -> TurnFinder:
    """`finder` with what the template writes around turns: the end of a turn, and the tokens that separate turns."""
    first = finder.skeleton_of_roles(["user", "assistant", "user"], None)
    if first is None:
        first = finder.skeleton_of_roles(["user", "assistant"], None)
    if first is None:
        return replace(finder, boundaries=_known(finder, [tokenizer.bos_token, tokenizer.eos_token]))
    at = next(index for index, slot in enumerate(first.slots) if slot.assistant)
    behind = first.slots[at + 1].before if at + 1 < len(first.slots) else first.rest
    opening, prompts = _opening(template=finder.template)
    finder = replace(finder, end_of_turn=behind[: first.slots[at].tail], opening=opening, prompts=prompts)
    finder = replace(finder, end_of_chat=_end_of_chat(finder))
    around: list[str | None] = [tokenizer.bos_token, tokenizer.eos_token]
    for roles in (["user", "assistant", "user", "assistant"], ["system", "user", "assistant"], ["user", "assistant"]):
        skeleton = finder.skeleton_of_roles(roles, None)
        fixed = skeleton.fixed([{"role": role, "content": ""} for role in roles]) if skeleton is not None else None
        around += finder.added.findall("\n".join(fixed or []))
    return replace(finder, boundaries=_known(finder, around))


def _end_of_chat(finder: TurnFinder) -> str:
    short = finder.skeleton_of_roles(["user", "assistant"], None)
    if short is None or (finder.end_of_turn and short.rest.startswith(finder.end_of_turn)):
        return finder.end_of_turn
    token = finder.added.match(short.rest.lstrip())
    return token[0] if token is not None else finder.end_of_turn


def _known(finder: TurnFinder, tokens: Sequence[str | None]) -> tuple[str, ...]:
    """Those that are added tokens. A generation prompt may open the thinking, which data write themselves too."""
    known = (token for token in tokens if token and finder.added.fullmatch(token))
    return tuple(dict.fromkeys(token for token in known if not _THINKING.search(token)))


def _opening(template: Renders) -> tuple[str, bool]:
    """What stands before a turn, and whether the template writes it when asked for a generation prompt."""
    asked: list[Message] = [{"role": "user", "content": "?"}]
    plain, prompted = (template.render(asked, None, prompt=prompt) for prompt in (False, True))
    if prompted != plain:
        return (prompted[len(plain) :] if prompted.startswith(plain) else ""), True
    answered = template.render([*asked, {"role": "assistant", "content": "\ue000"}], None)
    header = answered[len(plain) : answered.find("\ue000")] if answered.startswith(plain) else ""
    # Mistral's blank before an answer is part of the answer: nothing opens a turn there.
    return (header, False) if header.strip() else ("", True)


def _wants_text_arguments(template: ChatTemplate) -> bool:
    """Does it join a call's arguments to text (DeepSeek) instead of writing them as JSON?"""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    called: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "name": "f", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "!"},
    ]
    try:
        template.render(called, None)
    except RowProblem:
        try:
            replace(template, text_arguments=True).render(called, None)
        except RowProblem:
            return False
        return True
    return False


def _marks_hold(template: ChatTemplate) -> bool:
    """Do the template's marks hold what the assistant says and nothing that others say?

    transformers counts the characters before a mark by what was written out so far, which misses what a macro or a
    `set` block still holds back: such marks point to the wrong place.
    """
    if not all(_MARKS.search(source) for source in (template.source, template.tool_source)):
        return False
    said = [{"role": role, "content": f"\ue000{n}\ue001"} for n, role in enumerate(["user", "assistant"] * 2)]
    try:
        text, marks = template.render_marked(said, None)
    except RowProblem:
        return False
    for message in said:
        start = text.find(message["content"])
        inside = any(a <= start and start + len(message["content"]) <= b for a, b in marks)
        touched = any(a < start + len(message["content"]) and start < b for a, b in marks)
        if start < 0 or (message["role"] == "assistant" and not inside) or (message["role"] == "user" and touched):
            log.warning("The {%% generation %%} marks of %s are at the wrong text and are not used.", template.name)
            return False
    return True


def _check_built_in(section: DataSection, finder: TurnFinder, added: Sequence[str]) -> None:
    end = finder.end_of_turn
    if section.chat_template in BUILT_IN and end not in added:
        raise UserInputError(
            f"The chat template '{section.chat_template}' does not fit this tokenizer.",
            why=f"It ends a turn with {end or 'nothing'}, which is not a special token of this tokenizer: the model "
            "would learn to spell it out, and generation would not stop on it.",
            fix="Use a template of the model's own family, or a tokenizer that has the token.",
        )


def _check_turns_are_found(chat: ChatRenderer) -> None:
    """Raise before training if the assistant's turns cannot be found in a small conversation."""
    said: list[Message] = [{"role": "user", "content": "Which one?"}, {"role": "assistant", "content": "That one."}]
    try:
        text, turns = chat._found_turns(Conversation(said))
        found = [text[start:end] for start, end in turns]
    except RowProblem as problem:
        raise UserInputError(
            "Cannot determine which tokens are the assistant's.", why=f"On a test conversation: {problem}", fix=_FIX
        ) from problem
    if len(found) != 1 or "That one." not in found[0] or "Which one?" in found[0]:
        raise UserInputError(
            "Cannot determine which tokens are the assistant's.",
            why=f"{chat.template.name} renders a test conversation ambiguously: {text[:200]!r}",
            fix=_FIX,
        )
    if not chat.finder.end_of_turn:
        log.warning(
            "%s ends the assistant's turn without a token: the model does not learn when to stop.",
            chat.template.name,
        )
