"""What does a failure say to the person who has to fix it? One family: what happened, why, what to change."""

from __future__ import annotations


class ShardtuneError(Exception):
    """A failure with an answer. The command line prints its three parts and no traceback.

    Args:
        what: What happened, in one sentence, naming the file, key or value at fault.
        why: Why that is a problem (or what was found instead). May be empty.
        fix: What to change. May be empty only where nothing can be.
        code: What `shardtune explain` knows it by (run/error_codes.py); most errors need no more than their own words.

    Example:
        >>> raise ShardtuneError("The model folder 'm' does not exist.", fix="Check model.model_name_or_path.")
    """

    exit_code = 1
    code = ""

    def __init__(self, what: str, *, why: str = "", fix: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.code = code or type(self).code

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


class MachineError(ShardtuneError):
    """A machine has computed or stored something wrong: a restart of the run may well succeed."""


class UserInputError(ShardtuneError):
    """The config, a path or an option is wrong: nothing was started (exit code 2)."""

    exit_code = 2
