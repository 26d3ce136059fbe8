"""How does a report look? The pictures of the README and of docs/index.md: a run's report in a headless Chromium.

python docs/hooks/report_picture.py runs/quickstart/ID     renews docs/assets/report-*.png (`make picture`)
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from shardtune.report.history import RunHistory
from shardtune.report.page import write_page
from shardtune.report.view import run_view

PLACE = Path(__file__).parents[1] / "assets"
SCHEMES = ("light", "dark")
_WIDTH, _LAST = 1180, "#chart-loss"  # of the window; the picture ends below this chart
_SHARPNESS = 1.5  # pixels of the picture for one of the window
_COLOURS = 128  # of its palette
_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
_DRAWN = "(place) => document.querySelector(`${place} .plot .scatterlayer path`) !== null"


def pictures(run: Path) -> dict[str, bytes]:
    """A PNG for each colour scheme."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("This needs a Chromium: apt-get install chromium.")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        _write(run, page)
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_OPTIONS))
        found = {}
        for scheme in SCHEMES:
            window = browser.new_context(
                viewport={"width": _WIDTH, "height": 1400},
                color_scheme="dark" if scheme == "dark" else "light",
                device_scale_factor=_SHARPNESS,
            ).new_page()
            window.goto(page.as_uri())
            found[scheme] = _picture(window)
        browser.close()
    return found


def _write(run: Path, page: Path) -> None:
    """The report, with paths as they are seen from where the run was started."""
    history = RunHistory(run.resolve())
    history.update()
    started = run.resolve().parents[2] if run.parent.name == "quickstart" else run.resolve().parents[1]
    text = json.dumps(run_view(history, time.time()))
    for path, short in ((f"{started}/", ""), (str(Path.home()), "~")):
        text = text.replace(path, short)
    write_page(json.loads(text), page)


def _picture(window: Page) -> bytes:
    for _ in range(200):
        if window.evaluate(_DRAWN, _LAST):
            break
        window.wait_for_timeout(50)
    window.wait_for_timeout(500)
    box = window.locator(_LAST).bounding_box()
    if box is None:
        sys.exit(f"The report has no chart {_LAST}.")
    shot = window.screenshot(clip={"x": 0, "y": 0, "width": _WIDTH, "height": box["y"] + box["height"] + 12})
    out = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run, such as one of the quickstart")
    for scheme, png in pictures(parser.parse_args().run).items():
        file = PLACE / f"report-{scheme}.png"
        file.write_bytes(png)
        print(f"{file} ({len(png) / 1000:.0f} KB)")


if __name__ == "__main__":
    main()
