"""What did a guard detect? One form for the event, the console line and the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtune.errors import ShardtuneError

_ROWS_SHOWN = 8
_ROWS_WRITTEN = 256


@dataclass(frozen=True)
class Alarm:
    """A problem that a guard detected.

    Attributes:
        guard: Its name, which is also its setting: `guards.<name>`.
        step: The optimizer step it was detected in, counted from 1.
        text: One sentence for people.
        value: What was measured, and `limit` what it was compared with.
        ranks: The affected ranks; empty when all are.
        rows: The rows of data in the affected batches.
        since: The first affected step; what a rollback skips begins there.
        fix: What the user may change.
    """

    guard: str
    step: int
    text: str
    value: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    since: int | None = None
    fix: str = ""

    @property
    def first_step(self) -> int:
        return self.step if self.since is None else self.since

    def event(self, action: str, to_step: int | None = None) -> dict[str, Any]:
        """The fields of the `guard` event; unset ones are omitted."""
        fields: dict[str, Any] = {"guard": self.guard, "step": self.step, "action": action, "text": self.text}
        optional = {"value": self.value, "limit": self.limit, "ranks": list(self.ranks), "to_step": to_step}
        fields |= {name: value for name, value in optional.items() if value not in (None, [])}
        if self.rows:
            fields["rows"] = list(self.rows[:_ROWS_WRITTEN])
        return fields

    def sentence(self) -> str:
        """The text with the affected rows."""
        return f"{self.text} {format_rows(self.rows)}".strip()


class GuardStop(ShardtuneError):
    """A guard ended the run, on every rank together."""


class RollBack(Exception):
    """Leaves the training loop on every rank together; the caller restores a checkpoint and enters the loop again."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm.text)
        self.alarm = alarm


def format_rows(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - _ROWS_SHOWN} more" if len(rows) > _ROWS_SHOWN else ""
    return f"Rows: {', '.join(rows[:_ROWS_SHOWN])}{more}."
