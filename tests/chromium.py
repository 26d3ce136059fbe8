"""A real Chromium for the tests that need one; without it they say so and skip."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from browsing import LONG, Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# It must not speak to anybody: no updates, no background traffic. The sandbox and the GPU are not there in containers.
_OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For a file of tests, not for the session: Playwright's event loop must not run under what comes after them."""
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
