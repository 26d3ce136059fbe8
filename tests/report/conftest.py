"""A real Chromium for the tests that need one; without it they say so and skip."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# It must not speak to anybody: no updates, no background traffic. The sandbox and the GPU are not there in containers.
_OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if _CHROMIUM is None:
        pytest.skip("needs a Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=_CHROMIUM, args=list(_OPTIONS))
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Open a page of some size and colour scheme; at the end it must have no errors and have asked nobody else."""
    visits: list[Visit] = []

    def make(width: int = 1440, height: int = 1000, scheme: str = "light") -> Visit:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        context.set_default_timeout(LONG)
        made = Visit(context.new_page())
        made.page.on(
            "console", lambda said: made.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        made.page.on("pageerror", lambda error: made.errors.append(str(error)))
        made.page.on("dialog", lambda dialog: (made.dialogs.append(dialog.message), dialog.dismiss()))

        def route(asked: Any) -> None:
            if asked.request.url.startswith(("http://127.0.0.1:", "file://")):
                asked.continue_()
            else:
                made.outside.append(asked.request.url)
                asked.abort()

        context.route("**/*", route)
        visits.append(made)
        return made

    yield make
    for made in visits:
        made.page.context.close()
        made.check()
