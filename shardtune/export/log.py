"""What does an export print? Labelled lines, warnings that are kept for the result, and a progress line."""

from __future__ import annotations

import time

from rich.console import Console

from shardtune import terminal

_EVERY_SECONDS = 2.0


class ConsoleLog:
    """Prints to the terminal (`ExportLog`).

    Args:
        to_stderr: stdout is kept for JSON.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        self.console = Console(stderr=to_stderr, highlight=False)
        self.warnings: list[str] = []
        self._shown = 0.0

    def say(self, label: str, text: str) -> None:
        terminal.say(self.console, label, text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        terminal.say(self.console, "warning", text, "bold red")

    def progress(self, done: int, total: int) -> None:
        """One line that is overwritten, on a terminal only."""
        now = time.monotonic()
        if not self.console.is_terminal or (now - self._shown < _EVERY_SECONDS and done < total):
            return
        self._shown = now
        text = f"{terminal.size(done)} of {terminal.size(total)}"
        self.console.print(f"{'':<9} {text:<40}", end="\r" if done < total else "\r\033[K")
