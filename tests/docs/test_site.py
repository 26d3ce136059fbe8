"""The documentation as a site: it builds strictly, every page is in a menu, and it works where there is no internet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from running import REPOSITORY

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What a browser fetches by itself: not what a reader may click on.
_FETCHED = re.compile(
    r"""<(?:script|img|source|iframe|video|audio|embed)\b[^>]*?\s(?:src|srcset)=["']?([^"'\s>]+)|"""
    r"""<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|preconnect|prefetch|dns-prefetch|modulepreload))"""
    r"""[^>]*?\shref=["']?([^"'\s>]+)"""
)
_LINKED = re.compile(r"""<a\b[^>]*?\shref=["']?([^"'\s>]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_a_menu_and_there_is_no_other(site: Path) -> None:
    pages = {file.name for file in (REPOSITORY / "docs").glob("*.md")}
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    menu = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    named = [page for group in menu for entries in group.values() for entry in entries for page in entry.values()]
    assert len(named) == len(set(named))
    assert {page for page in named if not page.startswith("repository/")} == pages
    missing = [page for page in named if not (site / page.replace("README", "index")).with_suffix(".html").is_file()]
    assert missing == []


def test_files_outside_docs_have_a_page_and_links_lead_there(site: Path) -> None:
    recipe = (site / "repository" / "configs" / "dense-8b-one-gpu.yaml.html").read_text(encoding="utf-8")
    assert "learning_rate" in recipe and "target_modules" in recipe
    assert 'href="repository/CONTRIBUTING.html' in (site / "design.html").read_text(encoding="utf-8")
    assert 'href="../docs/' not in (site / "repository" / "CONTRIBUTING.html").read_text(encoding="utf-8")


def test_tables_and_links_read_as_on_a_forge(site: Path) -> None:
    commands = (site / "commands.html").read_text(encoding="utf-8")
    assert "<code>--dry-run client|server</code>" in commands
    assert 'href="exit-codes.html">Exit codes</a>' in commands, "links are called by the page's name in the menu"


def test_nothing_is_fetched_from_elsewhere_and_every_file_is_there(site: Path) -> None:
    fetched = 0
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for found in _FETCHED.finditer(text):
            address = next(filter(None, found.groups())).partition("#")[0].partition("?")[0]
            fetched += 1
            assert "//" not in address, f"{page}: {address}"
            if not address.startswith("data:") and page.name != "404.html":
                assert (page.parent / address).is_file(), f"{page}: {address}"
        for address in _LINKED.findall(text):
            name = address.partition("#")[0]
            if name and "//" not in name and page.name != "404.html":
                assert (page.parent / name).exists(), f"{page}: {address}"
    assert fetched > 100
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_pictures_of_a_report_are_small_and_a_script_makes_them() -> None:
    files = [REPOSITORY / "docs" / "assets" / f"report-{scheme}.png" for scheme in ("light", "dark")]
    assert sum(file.stat().st_size for file in files) < 300_000
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/assets/{file.name}" in readme and file.read_bytes()[:4] == b"\x89PNG" for file in files)
    assert "report_picture.py" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")


def test_the_readme_fits_on_two_screens() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_copy_button_takes_the_commands_without_prompts_and_output(address: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if _CHROMIUM is None:
        pytest.skip("needs a Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        for name, shown, copied in (
            ("own-data", "torchrun", "torchrun --nproc-per-node 2 -m shardtune train run.yaml"),
            ("quickstart", "task      turn a sentence", "make quickstart"),
        ):
            page.goto(f"{address}/{name}.html")
            page.locator("pre", has_text=shown).first.locator(".md-code__button[data-md-type=copy]").click()
            assert page.evaluate("navigator.clipboard.readText()").strip() == copied
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_it_asks_nobody_else_and_finds_what_is_searched(address: str, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if _CHROMIUM is None:
        pytest.skip("needs a Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme).new_page()
        asked: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name in ("index", "config-reference", "commands", "what-fits", "troubleshooting"):
            page.goto(f"{address}/{name}.html")
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{name} is {wide} pixels too wide for a phone"
        assert page.evaluate("document.body.dataset.mdColorScheme") == ("slate" if scheme == "dark" else "default")
        page.goto(f"{address}/index.html")
        page.locator("label.md-header__button[for=__search]").click()
        page.locator("input.md-search__input").press_sequentially("rendezvous", delay=20)
        page.locator(".md-search-result__item a").first.wait_for()
        assert all(url.startswith((address, "data:", "blob:")) for url in asked), asked
        assert errors == []
        browser.close()
