"""The dashboard in a real Chromium: it follows runs as they are written, listed, compared and deleted."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import Visit
from fake_run import FakeRun
from serving import dashboard
from toys import toy_config

from shardtune.report.chat_servers import ChatServer, recorded

if TYPE_CHECKING:
    from playwright.sync_api import Page

STEPS = "Number(document.querySelector('.tile .value')?.textContent.replaceAll(',', '') ?? 0)"
LAST_X = "(document.querySelector('#chart-loss .plot')?._fullData?.at(-1)?.x?.at(-1) ?? 0)"


def begun(folder: Path, steps: int = 30, now: float | None = None) -> FakeRun:
    run = FakeRun(folder, ranks=2)
    run.now = now or time.time()
    run.begin(100)
    for step in range(1, steps + 1):
        run.step(step, 100)
    return run


def top_of(page: Page, selector: str) -> float:
    return float(page.evaluate("(s) => document.querySelector(s).getBoundingClientRect().top + scrollY", selector))


def test_a_run_is_followed_while_another_process_writes_it(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path
) -> None:
    run = begun(tmp_path / "runs" / "live", now=time.time() - 60)
    with dashboard(environment, tmp_path / "runs") as served:
        at = visit()
        page = at.open(f"{served.url}runs/live")
        at.until(f"{STEPS} === 30 && {LAST_X} === 30")
        places = {chart: top_of(page, f"#chart-{chart}") for chart in ("loss", "mfu", "gpu_memory")}
        page.evaluate("window.kept = document.querySelector('#chart-loss')")
        page.locator("#config summary").first.click()
        was_open = page.locator("#config details").first.get_attribute("open")
        page.locator("#chart-loss").scroll_into_view_if_needed()  # what is out of sight is drawn when it is seen
        page.locator("button[aria-label='Zoom in']").click()
        at.until("document.querySelector('[data-range]').textContent.startsWith('steps ')")
        zoomed = page.locator("[data-range]").text_content()
        writer = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "fake_run.py"), str(run.folder), "31", "100", "0.02"],
            env=environment,
        )
        try:
            at.until(f"{STEPS} > 32 && {LAST_X} > 32")
            assert page.locator("[data-range]").text_content() == zoomed, "an update does not take the zoom away"
            assert writer.wait(timeout=60) == 0
        finally:
            writer.kill()
            writer.wait()
        run.raw('{"v": 2, "time": 17')
        at.until(f"{STEPS} === 100 && {LAST_X} === 100")
        assert page.evaluate("document.querySelector('#chart-loss') === window.kept"), "charts are kept, not made again"
        assert {chart: top_of(page, f"#chart-{chart}") for chart in places} == places, "nothing jumps"
        assert page.locator("#config details").first.get_attribute("open") == was_open
        assert page.locator(".badge").first.inner_text() == "running"
        run.raw("\n")
        run.end(100)
        at.until("document.querySelector('.badge').textContent === 'done'")


def test_a_chart_that_comes_later_takes_its_place_and_its_neighbours_make_room(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path
) -> None:
    run = begun(tmp_path / "runs" / "one")
    with dashboard(environment, tmp_path / "runs") as served:
        at = visit(height=1600)
        at.open(f"{served.url}runs/one")
        drawn = "(id) => document.querySelector(`#chart-${id} .main-svg`)?.getBoundingClientRect().width ?? 0"
        fits = f"Math.abs(({drawn})('learning_rate') - document.querySelector('#chart-learning_rate .plot').clientWidth) < 2"
        at.until(f"({drawn})('learning_rate') > 1000 && {fits}")
        run.evaluate(30, 1.5)
        at.until(f"({drawn})('eval') > 0 && ({drawn})('learning_rate') < 1000 && {fits}")
        order = "[...document.querySelectorAll('#group-learning .figure')].map((f) => f.id).join(' ')"
        assert at.page.evaluate(order) == "chart-loss chart-eval chart-grad_norm chart-learning_rate"


def test_runs_are_listed_sorted_filtered_and_compared(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path
) -> None:
    for index, name in enumerate(("alpha", "beta", "gamma")):
        run = begun(tmp_path / "runs" / name, steps=5 + index, now=time.time() - 100 * index)
        if name == "gamma":
            run.end(7)
    with dashboard(environment, tmp_path / "runs") as served:
        at = visit()
        page = at.open(served.url)
        names = "[...document.querySelectorAll('tr[data-run]')].map((r) => r.dataset.run).join()"
        at.until(f"{names} === 'alpha,beta,gamma'")
        assert page.locator("tr[data-run=gamma] .badge").inner_text() == "done"
        page.get_by_role("button", name="steps").click()
        at.until(f"{names} === 'gamma,beta,alpha'")
        page.get_by_role("searchbox").fill("running")
        at.until(f"{names} === 'beta,alpha'")
        page.get_by_role("searchbox").fill("")
        page.get_by_label("Compare alpha").check()
        assert page.get_by_role("button", name="Compare").is_disabled()
        page.get_by_label("Compare gamma").check()
        begun(tmp_path / "runs" / "delta", now=time.time())
        at.until(f"{names}.includes('delta')")
        assert page.get_by_label("Compare gamma").is_checked(), "a new run does not take the choice away"
        page.get_by_role("button", name="Compare 2 runs").click()
        at.until("document.querySelector('#chart-loss .plot')?._fullData?.length === 2")
        assert page.locator("h1").inner_text() == "2 runs compared"


def test_a_deleted_run_is_said_to_be_gone_and_stays_on_the_screen(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path
) -> None:
    begun(tmp_path / "runs" / "one")
    with dashboard(environment, tmp_path / "runs") as served:
        at = visit()
        page = at.open(f"{served.url}runs/one")
        at.until(f"{STEPS} === 30")
        shutil.rmtree(tmp_path / "runs" / "one")
        at.until("document.querySelector('#live').textContent === 'this run no longer exists'")
        assert page.locator("h1").inner_text() == "one"
        page = at.open(f"{served.url}runs/never-was")
        at.until("document.body.textContent.includes('There is no such run')")
        page = at.open(served.url)
        at.until("document.body.textContent.includes('No runs yet')")


@pytest.mark.slow
def test_a_thousand_runs_are_listed_on_every_screen(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path
) -> None:
    run = begun(tmp_path / "runs" / "run-0000", steps=2)
    for index in range(1, 1000):
        shutil.copytree(run.folder, tmp_path / "runs" / f"run-{index:04d}")
    with dashboard(environment, tmp_path / "runs") as served:
        at = visit(width=390)
        page = at.open(served.url)
        at.until("document.querySelectorAll('tr[data-run]').length === 1000")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.get_by_role("searchbox").fill("run-0777")
        at.until("document.querySelectorAll('tr[data-run]').length === 1")


def test_a_token_opens_the_pages_and_leaves_the_address(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path
) -> None:
    begun(tmp_path / "runs" / "one")
    with dashboard(environment, tmp_path / "runs", "--token", "correct-horse") as served:
        at = visit()
        page = at.open(served.url)
        at.until("document.querySelectorAll('tr[data-run]').length === 1")
        assert "token" not in page.url
        page.get_by_role("link", name="one").click()
        at.until(f"{STEPS} === 30")


@pytest.mark.slow
def test_a_real_training_is_followed_from_its_start_to_its_end(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation"},
        train={"max_steps": 250, "eval_steps": 50, "logging_steps": 1, "save_strategy": "steps", "save_steps": 50},
    )  # fmt: skip
    (tmp_path / "runs").mkdir()
    with dashboard(environment, tmp_path / "runs") as served:
        at = visit()
        page = at.open(served.url)
        at.until("document.body.textContent.includes('No runs yet')")
        training = subprocess.Popen(
            [sys.executable, "-m", "shardtune", "train", str(config), "--run-id", "real", "--nproc", "2"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            at.until("document.querySelector('tr[data-run=real] .badge')?.textContent === 'running'", limit=120_000)
            page.get_by_role("link", name="real").click()
            badge = "document.querySelector('.badge')?.textContent"
            at.until(f"{STEPS} > 0 && {STEPS} < 250 && {badge} === 'running'", limit=120_000)
            at.until(f"{STEPS} === 250 && {badge} === 'done'", limit=200_000)
            said, _ = training.communicate(timeout=120)
            assert training.returncode == 0, said
        finally:
            training.kill()
            training.communicate()
        at.until("document.querySelectorAll('#checkpoints tbody tr').length > 0")
        text = page.locator("main").inner_text()
        assert "best evaluation" in text and "all trainable" not in text and "parameters train" in text


@pytest.mark.slow
def test_a_run_that_has_ended_names_the_command_and_links_to_a_chat_while_it_is_served(
    visit: Callable[..., Visit], environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    environment.pop("XDG_RUNTIME_DIR", None)
    run = begun(tmp_path / "runs" / "one")
    run.checkpoint(30, None)
    with dashboard(environment, tmp_path / "runs") as served, socket.create_server(("127.0.0.1", 0)) as chat:
        at = visit()
        page = at.open(f"{served.url}runs/one")
        at.until(f"{STEPS} === 30")
        assert page.locator(".ask").count() == 0, "it still trains"
        run.end(30)
        at.until("document.querySelector('.ask code') !== null")
        command = f"shardtune chat {run.folder} --checkpoint latest --web"
        assert page.locator(".ask code").inner_text() == command and page.locator(".ask a").count() == 0
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy the command").click()
        at.until("document.querySelector('.ask button').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == command
        address = f"http://127.0.0.1:{chat.getsockname()[1]}/"
        answer = threading.Thread(target=_answer_once, args=(chat,))
        answer.start()
        with recorded(run.folder, ChatServer(address, needs_token=False)) as is_recorded:
            assert is_recorded
            at.until("document.querySelector('.ask a') !== null")
            with page.context.expect_page() as opened:
                page.locator(".ask a").click()
            opened.value.wait_for_load_state()
            assert opened.value.url == address and opened.value.inner_text("body") == "the chat"
        answer.join(30)
        at.until("document.querySelector('.ask a') === null")


def _answer_once(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        body = b"<link rel=icon href=data:,>the chat"
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
