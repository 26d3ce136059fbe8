"""Does an entry of lora.target_modules match a full name? Whole last parts, or a regular expression over all of it."""

from __future__ import annotations

import re

from shardtune.errors import UserInputError

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")


def matches(pattern: str, name: str) -> bool:
    """Does a name (by its whole last parts) or a regular expression (all of it) match a full name?

    Raises:
        UserInputError: the pattern is neither.
    """
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
