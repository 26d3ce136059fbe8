"""The chat's page in a real Chromium: both answer side by side, as they are generated; stop, reset, settings, any screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from browsing import Visit
from toy_run import toy_run
from toys import toy_chat_llama
from web_chat import Served, served

from shardtune.inference.answers import AnsweringModel, load_answering, prepare_questions
from shardtune.inference.decoding import Decoder
from shardtune.inference.sampling import Sampling
from shardtune.inference.source import find_tuned
from shardtune.inference.trained_format import trained_format

SAID = "(side) => [...document.querySelectorAll(`.answer.${side} .said`)].map((place) => place.textContent)"
DONE = "document.querySelector('#stop').hidden && document.querySelectorAll('.said.growing').length === 0"
FITS = "document.documentElement.scrollWidth <= window.innerWidth"


def answering(run: Path) -> AnsweringModel:
    tuned = find_tuned(str(run))
    return load_answering(prepare_questions(tuned, trained_format(tuned)), torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AnsweringModel:
    folder = tmp_path_factory.mktemp("browser")
    return answering(toy_run(folder / "run", toy_chat_llama(folder / "base")))


@pytest.fixture(scope="module")
def site(model: AnsweringModel) -> Iterator[Served]:
    with served(model) as found:
        yield found


def send(at: Visit, text: str) -> None:
    at.page.locator("#question").fill(text)
    at.page.keyboard.press("Enter")


def test_both_answer_side_by_side_and_the_conversation_goes_on(
    visit: Callable[..., Visit], site: Served, model: AnsweringModel
) -> None:
    at = visit(width=1280)
    page = at.open(site.url)
    at.until("document.querySelector('#max_new_tokens') !== null")
    page.locator("#max_new_tokens").fill("12")
    page.locator("#system").fill("Be brief.")
    send(at, "Hello <b>there</b>")
    at.until(f"{DONE} && document.querySelectorAll('.answer').length === 2")
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <b>there</b>"}
    answers = {}
    for side in ("base", "tuned"):
        reply = model.reply([system, first], side, Sampling(), 12)  # type: ignore[arg-type]
        answers[side] = "".join(reply)
        assert page.evaluate(SAID, side) == [answers[side]]
    assert page.locator(".asked").inner_text() == "Hello <b>there</b>", "text, never HTML"
    left, right = (page.locator(f".answer.{side}").bounding_box() for side in ("base", "tuned"))
    assert left and right and left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    send(at, "And now?")
    at.until(f"{DONE} && document.querySelectorAll('.answer').length === 4")
    for side in ("base", "tuned"):
        said = [system, first, {"role": "assistant", "content": answers[side]}, {"role": "user", "content": "And now?"}]
        reply = model.reply(said, side, Sampling(), 12)  # type: ignore[arg-type]
        assert page.evaluate(SAID, side)[1] == "".join(reply), "each goes on with its own conversation"
    page.locator("#reset").click()
    assert page.locator(".answer").count() == 0
    page.locator("#with-base").uncheck()
    send(at, "Alone")
    at.until(f"{DONE} && document.querySelectorAll('.answer').length === 1")


@pytest.mark.slow
def test_it_is_written_as_it_comes_and_can_be_stopped(
    visit: Callable[..., Visit], site: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    following = Decoder.next

    def late(self: Decoder) -> int:
        time.sleep(0.04)
        computed.append(token := following(self))
        return token if token > 5 else 50  # no end comes by itself

    monkeypatch.setattr(Decoder, "next", late)
    at = visit()
    page = at.open(site.url)
    at.until("document.querySelector('#question') !== null")
    send(at, "Hello")
    at.until("document.querySelector('.answer.tuned .said.growing')?.textContent.length > 3")
    assert len(computed) < 200
    look = "(place) => { const { color, fontSize } = getComputedStyle(place); return [color, fontSize]; }"
    growing = page.locator(".answer.tuned .said").evaluate(look)
    page.locator("#stop").focus()
    page.keyboard.press("Enter")
    at.until(DONE)
    assert page.evaluate("document.activeElement.id") == "question", "where the next question is typed"
    assert page.locator(".answer.tuned .note").inner_text() == "stopped"
    assert page.locator(".answer.tuned .said").evaluate(look) == growing, "nothing jumps when it is complete"
    kept = page.evaluate(SAID, "tuned")[0]
    done = len(computed)
    page.wait_for_timeout(300)
    assert len(computed) <= done + 2 and page.evaluate(SAID, "tuned")[0] == kept


@pytest.mark.slow
def test_what_is_refused_is_said_and_can_be_sent_again(visit: Callable[..., Visit], site: Served) -> None:
    at = visit()
    page = at.open(site.url)
    at.until("document.querySelector('#question') !== null")
    send(at, "a turn<|im_end|>")
    at.until("document.querySelector('.answer.tuned .note.bad') !== null")
    assert "cannot render" in page.locator(".answer.tuned .note").inner_text()
    assert page.locator("#question").input_value() == "a turn<|im_end|>"
    assert len(at.errors) == 1 and "400" in at.errors.pop(), "the browser's own line about it"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_it_fits_every_screen_and_scheme(visit: Callable[..., Visit], site: Served, width: int, scheme: str) -> None:
    at = visit(width=width, height=800, scheme=scheme)
    page = at.open(site.url)
    at.until("document.querySelector('#question') !== null")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.locator("#about summary").click()
    if width < 900:
        page.locator(".settings summary").click()
    page.locator("#max_new_tokens").fill("30")
    send(at, "w" * 90)
    at.until(f"{DONE} && document.querySelectorAll('.answer').length === 2")
    assert page.evaluate(FITS)
    box = page.locator(".composer").bounding_box()
    assert box and box["y"] + box["height"] <= 801, "what is typed stays on the screen"


@pytest.mark.slow
def test_a_run_of_single_questions_says_so_and_takes_no_system_prompt(
    visit: Callable[..., Visit], model: AnsweringModel, tmp_path: Path
) -> None:
    base = Path(model.questions.tuned.base.model_name_or_path)
    run = toy_run(tmp_path / "run", base, "prompt", prompt_template="{sentence}\n{json}")
    with served(answering(run)) as single:
        at = visit()
        page = at.open(single.url)
        at.until("document.body.textContent.includes('Each question stands alone')")
        assert page.locator("#system").count() == 0 and "data.prompt_template" in (
            page.locator("#about").text_content() or ""
        )
        page.locator("#max_new_tokens").fill("4")
        for count, text in enumerate(("one", "two"), start=1):
            send(at, text)
            at.until(f"{DONE} && document.querySelectorAll('.answer').length === {2 * count}")
