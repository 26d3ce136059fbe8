"""Which parts of the model train in full? Those that `lora.modules_to_save` names: embedding, head, norms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardtune.adapters.sites import matches
from shardtune.config.schema import LoraSection, entries_of
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardtune.model.outline import Outline


def saved_modules(
    outline: Outline, section: LoraSection, adapted: Collection[str], in_float8: Collection[str] = ()
) -> list[str]:
    """Full names of the modules that train in full, in the model's order.

    Args:
        adapted: What gets an adapter.
        in_float8: Modules whose weight is held in float8.

    Raises:
        UserInputError: an entry names nothing, a part with parts of its own, what gets an adapter, or one side of a
            tied embedding.
    """
    leaves = _leaves(outline)
    tied = {name.rpartition(".")[2] for name in (outline.embedding, outline.head)} if outline.tied else set()
    found: list[str] = []
    for entry in entries_of(section.modules_to_save):
        named = [name for name in leaves if matches(entry, name)]
        if not named:
            last = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in leaves))
            raise _refusal(entry, "matches no layer of the model", f"Its layers are: {last}.")
        for name in named:
            if name in adapted:
                raise _refusal(
                    name, "also gets an adapter (lora.target_modules)", "Remove it from one of the two lists."
                )
            if name in in_float8:
                raise _refusal(name, "is stored in FP8, which cannot be trained", "Set model.base_precision: bf16.")
            if name.rpartition(".")[2] in tied:
                raise _refusal(
                    name,
                    "is tied to the other embedding (tie_word_embeddings), and would be untied",
                    "Use model.new_tokens for tokens the model should learn.",
                )
        found += [name for name in named if name not in found]
    return found


def _leaves(outline: Outline) -> list[str]:
    """Modules that hold parameters and no other modules that do; routed experts are none of them."""
    parents = {owner[: at.start()] for owner in outline.owners for at in re.finditer(r"\.", owner)}
    experts = {name.rpartition(".")[0] for name in outline.family.experts}
    held = [owner for owner in outline.owners if owner not in parents and outline.below_layer(owner)[1] not in experts]
    return [*held, *([outline.head] if outline.tied and outline.head else [])]


def _refusal(name: str, what: str, fix: str) -> UserInputError:
    return UserInputError(f"lora.modules_to_save: '{name}' {what}.", fix=fix)
