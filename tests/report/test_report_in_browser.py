"""The report in a real Chromium: it draws, reacts, fits, and neither runs nor fetches anything foreign."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import Visit
from fake_run import FakeRun, script_run, showcase

from shardtune.report.compare import compare_view
from shardtune.report.formatting import when
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
    box = place(page, "loss")
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
    lines = page.locator("dl.facts").evaluate("(dl) => [...dl.children].map((e) => e.textContent)")
    facts = dict(zip(lines[::2], lines[1::2], strict=True))
    assert facts == {
        "Model": "toys/dense (7,241,732,096 parameters)",
        "Trains": "LoRA, rank 16: 28,311,552 parameters, 0.4 % of all; adapters on 55.6 % of the weights",
        "Data": "data/instructions: 11,870 rows, 4,210,000 tokens, 1,870,000 supervised (44 %)",
        "Validation": "600 rows, 210,000 tokens, 93,000 supervised (44 %)",
        "Hardware": "4 × NVIDIA H200; 4 processes",
        "Started": f"{when(1_790_000_000.0)} (on node-a)",
        "Command": "shardtune train run.yaml -o data.max_length=1024",
    }
    tiles = page.locator(".tile").all_inner_texts()
    assert "exact match\n71 %\nbefore: 0 %, 48 test rows" in tiles
    assert "best evaluation loss\n0.5548\nstep 400, best of 8 evaluations" in tiles and any(
        "final evaluation loss" in t for t in tiles
    )


def test_smoothing_leaves_the_raw_curve_in_sight(visit: Callable[..., Visit], reports: Path) -> None:
    at = visit()
    page = at.open((reports / "one.html").as_uri())
    at.until(DRAWN, "loss")
    curves = "document.querySelector('#chart-loss .plot')._fullData.filter((t) => t.name === 'training').map((t) => [t.opacity, t.y])"
    ((_, raw),) = page.evaluate(curves)
    page.locator("[data-smoothing]").fill("0.9")
    at.until(f"{curves}.length === 2")
    (faint, below), (_, smooth) = page.evaluate(curves)
    assert below == raw and faint < 0.5 and len(smooth) == len(raw)
    weighed = [0.9 ** (2 - i) for i in range(3)]  # the average of the first three, most of it the last
    assert smooth[2] == pytest.approx(sum(w * v for w, v in zip(weighed, raw, strict=False)) / sum(weighed))
    page.locator("[data-smoothing]").fill("0")
    at.until(f"{curves}.length === 1")


def test_curves_can_be_taken_along_as_csv(visit: Callable[..., Visit], reports: Path, tmp_path: Path) -> None:
    at = visit()
    page = at.open((reports / "one.html").as_uri())
    at.until(DRAWN, "loss")
    for button, name, charts in (
        ("[data-csv=grad_norm]", "grad_norm.csv", {"Gradient norm"}),
        ("button[aria-label='Download all curves as CSV']", "curves.csv", {"Loss", "Gradient norm", "Step time"}),
    ):
        with page.expect_download() as saved:
            page.locator(button).click()
        assert saved.value.suggested_filename == name
        saved.value.save_as(tmp_path / name)
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert charts <= {row["chart"] for row in rows}
        drawn = page.evaluate("window.shardtune.chartState.charts.find((c) => c.id === 'grad_norm').series[0].y")
        assert [float(row["value"]) for row in rows if row["chart"] == "Gradient norm"] == drawn


def test_every_axis_has_a_title_and_rates_say_whose_they_are(visit: Callable[..., Visit], reports: Path) -> None:
    at = visit()
    at.open((reports / "one.html").as_uri())
    at.until(DRAWN, "loss")
    titles = "(id) => { const l = document.querySelector(`#chart-${id} .plot`)?._fullLayout; return l && [l.xaxis.title.text, l.yaxis.title.text]; }"
    assert at.page.evaluate(titles, "loss") == ["optimizer step", "loss"]
    charts = at.page.evaluate("window.shardtune.chartState.charts.map((c) => [c.id, c.axis])")
    assert all(axis for _, axis in charts)
    assert dict(charts)["throughput"] == "tok/s, all ranks" and dict(charts)["rank_throughput"] == "tok/s per rank"


def test_on_paper_every_chart_is_drawn_in_light_colours_and_fits(visit: Callable[..., Visit], reports: Path) -> None:
    at = visit(scheme="dark")
    page = at.open((reports / "one.html").as_uri())
    at.until(DRAWN, "loss")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    at.until("[...document.querySelectorAll('.figure .plot')].every((plot) => plot.querySelector('.main-svg'))")
    wider = """[...document.querySelectorAll('.figure .plot')]
        .filter((plot) => plot._fullLayout.width > plot.clientWidth + 1 || plot.clientWidth > 700).map((plot) => plot.parentNode.id)"""
    assert page.evaluate(wider) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".tools, header.bar").first.is_visible()
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark"


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


@pytest.mark.parametrize("name", ["one", "both"])
def test_it_fits_screens_of_every_width(visit: Callable[..., Visit], reports: Path, name: str) -> None:
    at = visit(width=390)
    page = at.open((reports / f"{name}.html").as_uri())
    at.until("!!document.querySelector('#chart-loss')")
    for width in (390, 1024, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        at.until(FITS)


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
                hostile in page.locator("#samples").inner_text() and hostile in page.locator("#problems").inner_text()
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
    assert points == 2 and "2 values are NaN or infinite" in page.locator("#chart-loss").inner_text()


def test_a_scripts_report_draws_what_it_logged_over_steps_and_its_machine_over_time(
    visit: Callable[..., Visit], tmp_path: Path
) -> None:
    run = script_run(tmp_path / "script")
    for gpu in (50, 60, 70):  # only `usage` tells it: the steps ran on a CPU
        run.now += 600
        run.everywhere("usage", gpu={"utilization": gpu})
    run.log(1, "".join(f"line {i}\n" for i in range(60)) + "ValueError: the box is outside")
    run.write("run_failed", 1, exit_code=1, text="ValueError: the box is outside")
    run.script("train.py", exit_code=1, ended=run.now)
    write_page(run_view(history(run.folder), run.now), tmp_path / "script.html")
    at = visit(scheme="dark")
    page = at.open((tmp_path / "script.html").as_uri())
    at.until(DRAWN, "metric-loss")
    titles = page.locator("nav.sections a:visible").all_text_contents()
    assert titles == ["Warnings and failures", "Log", "Results", "Charts", "Ranks", "Checkpoints", "Environment"]
    assert page.locator(".tail").evaluate(
        "(log) => log.scrollHeight > log.clientHeight && log.lastElementChild.getBoundingClientRect().bottom <= log.getBoundingClientRect().bottom + 1"
    ), "the log begins at its end, where the error is"
    place(page, "metric-val-mAP-50")
    points = "document.querySelectorAll('#chart-metric-val-mAP-50 .scatterlayer .point').length"
    at.until(f"{points} === 3")
    axis = "(id) => document.querySelector(`#chart-${id} .plot`)?._fullLayout?.xaxis?.title?.text"
    assert page.evaluate(axis, "metric-loss") == "step"
    box = place(page, "gpu_utilization")
    at.until(DRAWN, "gpu_utilization")
    assert page.evaluate(axis, "gpu_utilization") == "minutes since the first event"
    whole = page.evaluate(RANGE, "gpu_utilization")
    page.mouse.move(box["x"] + 300, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 85, steps=4)
    page.mouse.up()
    at.until(f"(whole) => ({RANGE})('gpu_utilization')[1] < whole * 0.9", whole[1])
    assert page.evaluate("window.shardtune.chartState.ranges.step") is None, "time is another axis than steps"
    page.locator("button[aria-label='Show all steps']").press("Enter")
    at.until(f"(whole) => ({RANGE})('gpu_utilization')[1] === whole", whole[1])
    assert page.evaluate(FITS)
