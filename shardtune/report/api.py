"""What has changed since the last request? Histories that are cached and read incrementally, the latest ones."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtune.report import evaluations, formatting
from shardtune.report.chat_servers import chat_server
from shardtune.report.compare import compare_view
from shardtune.report.history import RunHistory
from shardtune.report.runs import RunList, RunRow, is_run, is_run_path
from shardtune.report.status import status_of
from shardtune.report.view import run_view

_KEPT = 12  # histories in memory: the runs that are viewed or compared
_READ_SECONDS = 5.0  # per request: a very long run appears in pieces rather than after a minute
MOST_COMPARED = 12


class RunsApi:
    """The dashboard's data for one folder of runs. Every response has a cursor; the same one means unchanged.

    Args:
        local: Its reader is on this machine: a chat that is served here can be linked to.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.time, *, local: bool = False) -> None:
        self.root, self.clock, self.local = root, clock, local
        self._list = RunList(root)
        self._known: OrderedDict[str, RunHistory] = OrderedDict()
        self._changes: dict[str, int] = {}
        self._lock, self._list_lock = (
            threading.Lock(),
            threading.Lock(),
        )  # reading a long run must not block the list
        self._born = secrets.token_hex(4)  # cursors of an earlier process are invalid

    def runs(self, cursor: str | None) -> dict[str, Any]:
        """The list of runs."""
        with self._list_lock:
            rows = [_row(row) for row in self._list.rows(self.clock())]
        return self._unless_known(
            cursor, f"{self._born}-{hash(repr(rows)):x}", lambda: {"root": str(self.root), "runs": rows}
        )

    def run(self, name: str, cursor: str | None) -> dict[str, Any] | None:
        """The view of one run; None if there is no such run."""
        with self._lock:
            history = self._read(name)
            if history is None:
                return None
            now, chat = self.clock(), self._chat(history)
            known = f"{self._cursor([history], now)}-{hash(repr(chat)):x}"
            return self._unless_known(cursor, known, lambda: {**run_view(history, now), "chat": chat})

    def compare(self, names: list[str], cursor: str | None) -> dict[str, Any] | None:
        """Several runs on the same axes; None if one of them does not exist."""
        with self._lock:
            histories = [history for name in dict.fromkeys(names[:MOST_COMPARED]) if (history := self._read(name))]
            if len(histories) < min(len(set(names)), MOST_COMPARED) or not histories:
                return None
            now = self.clock()
            return self._unless_known(cursor, self._cursor(histories, now), lambda: compare_view(histories, now))

    def _read(self, name: str) -> RunHistory | None:
        if not is_run_path(name) or not is_run(self.root / name):
            self._known.pop(name, None)
            return None
        history = self._known.pop(name, None) or RunHistory(self.root / name)
        self._known[name] = history
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        if history.update(_READ_SECONDS):
            self._changes[str(history.folder)] = self._changes.get(str(history.folder), 0) + 1
        return history

    def _chat(self, history: RunHistory) -> dict[str, str] | None:
        """Whether the run's model is being served, as text and, where it leads somewhere, as a link."""
        server = chat_server(history.folder)
        if server is None:
            return None
        if server.needs_token:
            return {"text": "A chat with this model is running: open the address that it printed."}
        if not self.local:
            return {"text": f"A chat with this model is running, for this machine alone: {server.address}"}
        return {"text": "Open the chat that is running", "address": server.address}

    def _cursor(self, histories: list[RunHistory], now: float) -> str:
        """Changes with the events, the other files, and the status, which also depends on the time."""
        parts = []
        for history in histories:
            status = status_of(history.folder, history.liveness, now, history.failure)
            changes = self._changes.get(str(history.folder), 0)
            parts.append((str(history.folder), changes, status, _beside(history.folder)))
        return f"{self._born}-{hash(repr(parts)):x}"

    @staticmethod
    def _unless_known(cursor: str | None, now: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return {"cursor": now, "unchanged": True} if cursor == now else {"cursor": now, **build()}


def _beside(folder: Path) -> list[int]:
    found = []
    for name in ("config.yaml", "environment.json", "checkpoints", evaluations.FOLDER):
        try:
            found.append((folder / name).stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return found


def _row(row: RunRow) -> dict[str, Any]:
    """A line of the list: texts to show, numbers to sort by."""
    seen = row.summary
    progress = min(1.0, (seen.step or 0) / seen.steps) if seen.steps else None
    steps = f"{seen.step or 0:,}" + (f" / {seen.steps:,}" if seen.steps else "")
    steps = "" if seen.liveness.is_script and not seen.step else steps  # it need not have any
    return {
        "name": row.name,
        "status": row.status.state,
        "why": formatting.plain(row.status.text, 300),
        "progress": progress,
        "cells": {
            "model or script": [formatting.plain(seen.model, 200), seen.model],
            "processes": [f"{seen.processes}" if seen.processes else "", seen.processes],
            "steps": [steps, seen.step],
            "loss": _shown(seen.loss, formatting.loss),
            "eval loss or metric": _metric(seen.metric) or _shown(seen.eval_loss, formatting.loss),
            "tok/s, all ranks": _shown(seen.tokens_per_second, formatting.short),
            "started": _shown(seen.started, formatting.when),
            "last event": _shown(seen.liveness.last_time, formatting.when),
        },
    }


def _metric(seen: tuple[str, float] | None) -> list[Any]:
    """A script's main metric with its name; the loss has a column of its own."""
    if seen is None or seen[0] == "loss":
        return []
    name, value = seen
    shown, key = _shown(value, formatting.value)
    return [f"{formatting.plain(name, 60)} {shown}", key]


def _shown(value: float | None, say: Callable[[float], str]) -> list[Any]:
    if value is None:
        return ["", None]
    return [say(value), value if abs(value) < float("inf") else None]
