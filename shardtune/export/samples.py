"""What do models read when they are compared? Rows of the run's own data, where they are at hand, or made-up tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardtune.data.prepare import sample_rows
from shardtune.data.source import sources_of
from shardtune.errors import UserInputError
from shardtune.inference.load import load_tuned_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardtune.inference.source import TunedModel

_ROWS, _TOKENS = 4, 128
_MADE_UP = 48  # tokens of each row


@dataclass(frozen=True)
class Samples:
    """What the models read.

    Attributes:
        ids: (samples, tokens), filled up at the right: a causal model's earlier tokens do not see that.
        real: Which of them count.
        source: Where they come from, for people.
    """

    ids: Tensor
    real: Tensor
    source: str


def samples_for(tuned: TunedModel, folder: Path, known: int) -> Samples:
    """A few rows of tokens.

    Args:
        folder: Of the base model's files.
        known: Ids below this one are rows of the base's embedding. The others (new tokens) are left out: the base
            knows nothing of them, so that there is no difference to it.
    """
    tokenizer = _tokenizer(tuned, folder)
    rows = _own_rows(tuned, tokenizer, known) if tokenizer is not None else []
    if rows:
        assert tuned.config is not None
        where = "training" if tuned.config.data.val_split is None else "validation"
        return _batch(rows, f"{sum(map(len, rows))} tokens of the run's {where} data")
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    words = min(known, len(tokenizer)) if tokenizer is not None else known
    usable = torch.tensor([number for number in range(words) if number not in special])
    drawn = torch.randint(len(usable), (_ROWS, _MADE_UP), generator=torch.Generator().manual_seed(0))
    return _batch(usable[drawn].tolist(), f"{_ROWS * _MADE_UP} random tokens (the run's data is not at hand)")


def _tokenizer(tuned: TunedModel, folder: Path) -> PreTrainedTokenizerBase | None:
    try:
        return load_tuned_tokenizer(tuned, folder)
    except UserInputError:  # the base has none; its weights are what is exported
        return None


def _own_rows(tuned: TunedModel, tokenizer: PreTrainedTokenizerBase, known: int) -> list[list[int]]:
    if tuned.config is None or not all(_is_here(source.path) for source in sources_of(tuned.config.data)):
        return []
    try:
        rows = sample_rows(tuned.config.data, tokenizer, _ROWS)
    except (UserInputError, OSError):  # moved, or changed since then
        return []
    rows = [[number for number in row if number < known][:_TOKENS] for row in rows]
    return [row for row in rows if len(row) > 1]


def _is_here(path: str) -> bool:
    return "://" not in path and Path(path).expanduser().exists()


def _batch(rows: list[list[int]], source: str) -> Samples:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in rows])
    real = torch.arange(longest) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
    return Samples(ids, real, source)
