"""Which modules does each LoRA target mean? Every entry must match, and what it matched can be shown."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class Target:
    """One entry of `lora.target_modules` and the full names of the modules it matched."""

    pattern: str
    modules: tuple[str, ...]


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Every `nn.Linear` that may take an adapter: all but the output head (TRL multiplies by its weight directly)."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def resolve_targets(model: PreTrainedModel, patterns: str | list[str]) -> list[Target]:
    """What each pattern matches, in the order written. A module two patterns match counts for the first.

    Args:
        patterns: `all-linear`, a module name (`q_proj`, `layers.0.self_attn.q_proj`), a regular expression over full
            module names, or a list of these.

    Raises:
        UserInputError: a pattern matches no linear module; the message lists the names there are.
    """
    entries = [patterns] if isinstance(patterns, str) else list(patterns)
    candidates = linear_modules(model)
    if not entries:
        raise UserInputError(
            "lora.target_modules is empty: nothing would train.", fix="Use all-linear, or name modules."
        )
    taken: set[str] = set()
    targets = []
    for entry in entries:
        matched = [name for name in candidates if _matches(entry, name)]
        if not matched:
            raise _no_match(model, entry, candidates)
        targets.append(Target(entry, tuple(name for name in matched if name not in taken)))
        taken.update(matched)
    return targets


def _matches(pattern: str, name: str) -> bool:
    if pattern == ALL_LINEAR:
        return True
    if _PLAIN_NAME.fullmatch(pattern):
        return name == pattern or name.endswith(f".{pattern}")
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UserInputError(
            f"lora.target_modules: '{pattern}' is not a valid regular expression.",
            why=str(error),
            fix="Use a module name such as q_proj, or a pattern over full names such as .*self_attn.*proj.",
        ) from error


def _no_match(model: PreTrainedModel, entry: str, candidates: dict[str, nn.Linear]) -> UserInputError:
    counts = Counter(name.rsplit(".", 1)[-1] for name in candidates)
    listing = ", ".join(f"{name} (×{count})" for name, count in counts.items())
    other = [module for name, module in model.named_modules() if name and _matches(entry, name)]
    if other and other[0] is model.get_output_embeddings():
        why = f"'{entry}' is the output head; TRL's loss multiplies by its weight directly, so an adapter never trains."
    elif other:
        why = f"'{entry}' names {len(other)} module(s) of class {type(other[0]).__name__}, which is not a linear layer."
    else:
        near = difflib.get_close_matches(entry, counts, n=1)
        why = f"Did you mean '{near[0]}'?" if near else ""
    return UserInputError(
        f"lora.target_modules: '{entry}' matches no linear layer of {type(model).__name__}.",
        why=why,
        fix=f"Linear layers there are: {listing}.",
    )
