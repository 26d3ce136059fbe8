"""Which text is certain already? Tokens become text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what half a character decodes to
_CONTEXT = 8  # tokens of the prompt: whether a word begins with a space may depend on what stands before it


class TokenText:
    """The text of tokens, one after the other. A character of several tokens comes with the last of them.

    Args:
        prompt: What the tokens follow.
        special: Show special tokens, too.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = (), *, special: bool = False
    ) -> None:
        self.tokenizer, self._special = tokenizer, special
        self._ids = list(prompt[-_CONTEXT:])
        self._begin, self._told = 0, len(self._ids)  # decoded together, and up to where their text is told

    def add(self, token: int) -> str:
        """The text that is certain with this token; empty if it ends within a character."""
        self._ids.append(token)
        before, now = self._decoded(self._told), self._decoded(len(self._ids))
        if now.endswith(_INCOMPLETE) or len(now) <= len(before):
            return ""
        # From here on, the next tokens are decoded with those that were told last, whose text is known.
        self._begin, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def finish(self, *, is_cut: bool) -> str:
        """The rest, when no more tokens come.

        Args:
            is_cut: More would have come: half a character at the end is left out.
        """
        rest = self._decoded(len(self._ids))[len(self._decoded(self._told)) :]
        return rest.rstrip(_INCOMPLETE) if is_cut else rest

    def _decoded(self, end: int) -> str:
        return str(
            self.tokenizer.decode(
                self._ids[self._begin : end],
                skip_special_tokens=not self._special,
                clean_up_tokenization_spaces=False,
            )
        )


class AnswerText:
    """The text of an answer: without blanks around it, and without what the training's template has behind it.

    Args:
        stripped: Take blanks away at both ends; False: the text is a continuation, to the character.
        tail: Literal text behind every answer of the training rows.
        tail_ends: An answer ends with its tail: training had no end token.
    """

    def __init__(self, *, stripped: bool, tail: str = "", tail_ends: bool = False) -> None:
        self.text = ""  # what was given out
        self.ended = False
        self._stripped, self._tail, self._tail_ends = stripped, tail, bool(tail) and tail_ends
        self._held = ""

    def add(self, piece: str) -> str:
        """What can be shown now."""
        self._held += piece
        if self._stripped and not self.text:
            self._held = self._held.lstrip() if self._held.strip() else self._held
        if self._tail_ends and self._tail in self._held:
            self._held = self._held.partition(self._tail)[0]
            self.ended = True
            return ""
        return self._give(len(self._held) - self._uncertain())

    def finish(self) -> str:
        """The rest."""
        self._held = self._held.removesuffix(self._tail)
        if self._stripped:
            self._held = self._held.rstrip() if self.text else self._held.strip()
        return self._give(len(self._held))

    def _give(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self.text += shown
        return shown

    def _uncertain(self) -> int:
        """How many characters at the end may have to be left out."""
        blanks = len(self._held) - len(self._held.rstrip()) if self._stripped else 0
        longest = min(len(self._tail), len(self._held))
        begun = next((n for n in range(longest, 0, -1) if self._held.endswith(self._tail[:n])), 0)
        return max(blanks, begun)
