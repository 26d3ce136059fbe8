"""`make picture`: the README's pictures of a report come from a run, one for each colour scheme."""

from __future__ import annotations

import importlib.util
import io
import shutil
from pathlib import Path

import pytest
from fake_run import showcase
from running import REPOSITORY

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
def test_a_run_becomes_a_light_and_a_dark_picture_without_paths_of_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    images = pytest.importorskip("PIL.Image", reason="needs the package pillow")
    if _CHROMIUM is None:
        pytest.skip("needs a Chromium (apt-get install chromium)")
    file = REPOSITORY / "docs" / "hooks" / "report_picture.py"
    spec = importlib.util.spec_from_file_location("report_picture", file)
    assert spec is not None and spec.loader is not None
    report_picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report_picture)

    run = tmp_path / "runs" / "a-run"
    showcase(run, ranks=1, steps=40)
    brightness = {}
    for scheme, png in report_picture.pictures(run).items():
        picture = images.open(io.BytesIO(png))
        assert picture.format == "PNG" and len(png) < 150_000
        brightness[scheme] = sum(picture.convert("L").resize((40, 40)).getdata()) / 1600
    assert brightness["dark"] < 60 < 200 < brightness["light"]
    page = tmp_path / "page.html"
    report_picture._write(run, page)
    assert str(tmp_path) not in page.read_text(encoding="utf-8")
