"""The report in a real Chromium: it draws, reacts, fits, and neither runs nor fetches anything foreign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import Visit
from fake_run import FakeRun, showcase

from shardtune.report.compare import compare_view
from shardtune.report.history import RunHistory
from shardtune.report.page import write_page
from shardtune.report.view import run_view

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Page

RANGE = "(id) => document.querySelector(`#chart-${id} .plot`)?._fullLayout?.xaxis?.range?.slice()"
DRAWN = "(id) => !!document.querySelector(`#chart-${id} .plot .main-svg .scatterlayer .trace`)"
FITS = "document.documentElement.scrollWidth <= window.innerWidth"


def history(folder: Path) -> RunHistory:
    found = RunHistory(folder)
    found.update()
    return found


def place(page: Page, chart: str) -> FloatRect:
    """Where a chart is on the screen, once it is."""
    page.locator(f"#chart-{chart}").evaluate("(found) => found.scrollIntoView({block: 'center'})")
    box = page.locator(f"#chart-{chart} .plot").bounding_box()
    assert box is not None
    return box


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    one, two = showcase(root / "one", ranks=4), showcase(root / "two", ranks=2, seed=2, r=32)
    write_page(run_view(history(one.folder), one.now), root / "one.html")
    write_page(compare_view([history(one.folder), history(two.folder)], one.now), root / "both.html")
    return root


def test_charts_react_to_hover_drag_and_keys_together(visit: Callable[..., Visit], reports: Path) -> None:
    at = visit()
    page = at.open((reports / "one.html").as_uri())
    at.until(DRAWN, "loss")
    box = place(page, "loss")
    page.mouse.move(box["x"] + 200, box["y"] + 80)
    at.until("document.querySelector('#chart-loss .hoverlayer').textContent.includes('training')")
    everything = page.evaluate(RANGE, "loss")
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 85, steps=4)
    page.mouse.up()
    at.until("document.querySelector('[data-range]').textContent.startsWith('steps ')")
    at.until(f"(whole) => ({RANGE})('eval')[1] < whole * 0.9", everything[1])
    zoomed = page.evaluate(RANGE, "loss")
    assert everything[0] < zoomed[0] < zoomed[1] < everything[1]
    assert page.evaluate(RANGE, "eval") == zoomed, "all charts share their axis"
    page.locator("button[aria-label='Show all steps']").focus()
    page.keyboard.press("Enter")
    at.until(f"(whole) => ({RANGE})('loss')[1] === whole", everything[1])
    page.locator("button[aria-label='Zoom in']").press("Enter")
    at.until(f"(whole) => ({RANGE})('eval')[1] < whole", everything[1])
    page.mouse.dblclick(box["x"] + 250, box["y"] + 90)
    at.until(f"(whole) => ({RANGE})('eval')[1] === whole", everything[1])


def test_the_loss_can_be_logarithmic_and_ranks_can_be_hidden(visit: Callable[..., Visit], reports: Path) -> None:
    at = visit()
    page = at.open((reports / "one.html").as_uri())
    at.until(DRAWN, "loss")
    page.locator("[data-log=loss]").click()
    at.until("document.querySelector('#chart-loss .plot')._fullLayout.yaxis.type === 'log'")
    page.locator("#chart-mfu").scroll_into_view_if_needed()
    at.until("document.querySelector('#chart-mfu .plot')?._fullData?.length === 4")
    page.get_by_role("button", name="rank 2").click()
    at.until("document.querySelector('#chart-mfu .plot')._fullData.length === 3")
    assert page.get_by_role("button", name="rank 2").get_attribute("aria-pressed") == "false"


def test_light_and_dark_follow_the_system_until_one_is_chosen(visit: Callable[..., Visit], reports: Path) -> None:
    at = visit(scheme="dark")
    page = at.open((reports / "one.html").as_uri())
    at.until(DRAWN, "loss")
    colours = "[getComputedStyle(document.body).backgroundColor, document.querySelector('#chart-loss .plot')._fullLayout.font.color]"
    dark = page.evaluate(colours)
    page.locator("#theme").click()
    at.until(f"(dark) => {{ const now = {colours}; return now[0] !== dark[0] && now[1] !== dark[1]; }}", dark)
    assert page.locator("html").get_attribute("data-theme") == "light"


def test_everything_of_the_run_is_on_the_page(visit: Callable[..., Visit], reports: Path) -> None:
    page = visit().open((reports / "one.html").as_uri())
    text = page.locator("main").inner_text()
    for said in (
        "best evaluation", "0.5548", "63 GiB", "Rank 2 takes 22 % longer", "train:812", "lowest evaluation loss",
        "Play something by Nina Simone.", "experts.gate_up_proj", "file: run.yaml:8:3", "node-a", "rows trained on",
    ):  # fmt: skip
        assert said in text, said


def test_compared_runs_are_overlaid(visit: Callable[..., Visit], reports: Path) -> None:
    at = visit()
    page = at.open((reports / "both.html").as_uri())
    at.until("document.querySelector('#chart-loss .plot')?._fullData?.length === 2")
    assert "lora.r" in page.locator("#differences").inner_text()
    whole = page.evaluate(RANGE, "loss")
    page.locator("[data-axis=tokens]").click()
    at.until(f"(whole) => ({RANGE})('loss')[1] > 1000 * whole", whole[1])
    ends = page.evaluate("document.querySelector('#chart-loss .plot')._fullData.map((t) => t.x.at(-1))")
    assert ends[0] == 2 * ends[1], "four ranks see twice the tokens of two"
    page.locator("[data-axis=step]").click()
    at.until(f"(whole) => ({RANGE})('loss')[1] === whole", whole[1])
    page.get_by_role("button", name="two", exact=True).click()
    at.until("document.querySelector('#chart-loss .plot')._fullData.length === 1")


@pytest.mark.parametrize("width", [1440, 1024, 390])
@pytest.mark.parametrize("name", ["one", "both"])
def test_it_fits_screens_of_every_width(visit: Callable[..., Visit], reports: Path, width: int, name: str) -> None:
    at = visit(width=width)
    page = at.open((reports / f"{name}.html").as_uri())
    at.until("!!document.querySelector('#chart-loss')")
    assert page.evaluate(FITS), page.evaluate("document.documentElement.scrollWidth")


def test_a_hostile_run_is_only_text(visit: Callable[..., Visit], tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)><a href='http://evil.example/'>x</a>"
    run = FakeRun(tmp_path / "a&lt;b><b>name", ranks=1)
    run.begin(5)
    for step in range(1, 4):
        run.step(step, 5)
    run.write("guard", guard=hostile, step=2, action="warn", text=hostile, rows=[hostile])
    run.write("sample", when="after", row="1", prompt=hostile, answer=hostile)
    run.write("run_failed", exit_code=1, text=hostile)
    (run.folder / "config.yaml").write_text(f'model:\n  "{hostile}": "{hostile}"  # {hostile}\n', encoding="utf-8")
    other = FakeRun(tmp_path / "other", ranks=1)
    other.begin(5)
    other.step(1, 5)
    found = history(run.folder)
    both = compare_view([found, history(other.folder)], run.now)
    for view, shown in ((run_view(found, run.now), "h1"), (both, ".chip")):
        write_page(view, tmp_path / "hostile.html")
        at = visit()
        page = at.open((tmp_path / "hostile.html").as_uri())
        at.until(DRAWN, "loss")
        assert page.locator(shown).first.inner_text() == "a&lt;b><b>name"
        assert page.locator("img, main script, main a[href^=http], svg a, b").count() == 0
        if view["kind"] == "run":
            assert (
                hostile in page.locator("#samples").inner_text() and hostile in page.locator("#troubles").inner_text()
            )
            page.locator("#chart-timeline").scroll_into_view_if_needed()
            mark = page.locator("#chart-timeline .point").last.bounding_box()
            assert mark is not None
            page.mouse.move(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
            at.until("document.querySelector('#chart-timeline .hoverlayer').textContent.includes('<script>alert')")
        else:
            box = place(page, "loss")
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
            at.until("document.querySelector('#chart-loss .hoverlayer').textContent.includes('a&lt;b><b>name')")
        assert page.locator("svg a").count() == 0


def test_what_is_no_number_is_marked(visit: Callable[..., Visit], tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "nan", ranks=1)
    run.begin(20)
    for step in range(1, 21):
        run.step(step, 20, loss=float("nan") if step in (7, 8) else None)
    write_page(run_view(history(run.folder), run.now), tmp_path / "nan.html")
    at = visit()
    page = at.open((tmp_path / "nan.html").as_uri())
    at.until(DRAWN, "loss")
    points = page.evaluate(
        "document.querySelector('#chart-loss .plot')._fullData.find((t) => t.yaxis === 'y2').x.length"
    )
    assert points == 2 and "2 values are no numbers" in page.locator("#chart-loss").inner_text()
