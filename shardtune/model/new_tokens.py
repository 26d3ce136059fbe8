"""Which tokens does `model.new_tokens` mean? They join the tokenizer before data is read, and get rows in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class NewTokens:
    """The tokens of `model.new_tokens` in one tokenizer.

    Attributes:
        numbers: Id of each, by its text, in the order of ids.
        existing: Those that the tokenizer had before.
        known: Ids below this one are tokens that the model was trained with.
        stored: Rows of the embedding that the checkpoint has.
    """

    numbers: Mapping[str, int]
    existing: tuple[str, ...] = ()
    known: int = 0
    stored: int = 0

    @property
    def ids(self) -> list[int]:
        return list(self.numbers.values())

    def is_unknown(self, token: str) -> bool:
        """Whether the model has no row that it was trained with for a token."""
        return token not in self.existing or self.numbers[token] >= self.stored

    def notices(self) -> list[str]:
        """Where the tokens are, and which of them are not new."""
        last = max(self.ids)
        told = [f"model.new_tokens: ids {', '.join(f'{number} {token}' for token, number in self.numbers.items())}"]
        if last >= self.stored:
            told[0] += f"; the embedding grows from {self.stored:,} to {last + 1:,} rows"
        known = [token for token in self.existing if not self.is_unknown(token)]
        if known:
            told.append(
                f"model.new_tokens: the model has {', '.join(known)} already: trained on from the rows it has for them."
            )
        return [f"{line}." for line in told]


def add_new_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> NewTokens:
    """Add to the tokenizer what it does not have.

    They are found in text exactly as written. They are not marked as special tokens, which decoding leaves out: what
    marks a tool call in the model's answer must be there for whoever reads it.
    """
    from tokenizers import AddedToken

    if not tokens:
        return NewTokens({})
    vocabulary = tokenizer.get_vocab()
    existing = tuple(token for token in tokens if token in vocabulary)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens if token not in vocabulary])
    numbers = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in tokens}  # type: ignore[arg-type]
    added = [number for token, number in numbers.items() if token not in existing]
    ordered = dict(sorted(numbers.items(), key=lambda item: item[1]))
    return NewTokens(ordered, existing, known=min(added, default=len(vocabulary)))


def resize_embeddings(model: PreTrainedModel, new: NewTokens) -> NewTokens:
    """Give embedding and head of a model on the meta device a row for every new token that has none.

    Many models have spare rows behind their vocabulary (Qwen some hundred): those are taken first.
    """
    rows = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    if max(new.ids) >= rows:
        model.resize_token_embeddings(max(new.ids) + 1, mean_resizing=False)
    return replace(new, known=min(new.known, rows), stored=rows)
