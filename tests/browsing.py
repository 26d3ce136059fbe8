"""A page in a browser, as tests look at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG = 40_000  # milliseconds: what a busy machine may take


@dataclass
class Visit:
    """A page, and everything it should not have done."""

    page: Page
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def open(self, address: str) -> Page:
        self.page.goto(address, wait_until="load")
        return self.page

    def until(self, condition: str, argument: Any = None, limit: int = LONG) -> None:
        """Wait for a condition in the page. (Playwright's own way needs eval, which our pages forbid.)"""
        for _ in range(limit // 50):
            if self.page.evaluate(condition, argument):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {condition} {argument or ''}")

    def check(self) -> None:
        assert self.errors == [] and self.outside == [] and self.dialogs == []
