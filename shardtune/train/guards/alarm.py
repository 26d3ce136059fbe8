"""What has a guard seen, and what does it say? One form for the event, the console line and the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtune.errors import ShardtuneError

_ROWS_SHOWN = 8
_ROWS_WRITTEN = 256


@dataclass(frozen=True)
class Alarm:
    """Something a guard does not like.

    Attributes:
        guard: Its name, which is also its setting: `guards.<name>`.
        step: The optimizer step it was seen in, counted from 1.
        text: One sentence a person understands.
        value: What was measured, and `limit` what it was held against.
        ranks: Whose it is, where it is not everybody's.
        rows: The rows of the data it came with.
        since: The first step that belongs to it; what a rollback passes over begins there.
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
        """The fields of the `guard` event; what means nothing is left out."""
        fields: dict[str, Any] = {"guard": self.guard, "step": self.step, "action": action, "text": self.text}
        optional = {"value": self.value, "limit": self.limit, "ranks": list(self.ranks), "to_step": to_step}
        fields |= {name: value for name, value in optional.items() if value not in (None, [])}
        if self.rows:
            fields["rows"] = list(self.rows[:_ROWS_WRITTEN])
        return fields

    def sentence(self) -> str:
        """With the rows it came with."""
        return f"{self.text} {rows_told(self.rows)}".strip()


class GuardStop(ShardtuneError):
    """A guard ended the run, on every rank together."""


class RollBack(Exception):
    """Leaves the training loop on every rank together; whoever called it goes back and calls it again."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(alarm.text)
        self.alarm = alarm


def rows_told(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - _ROWS_SHOWN} more" if len(rows) > _ROWS_SHOWN else ""
    return f"Rows: {', '.join(rows[:_ROWS_SHOWN])}{more}."
