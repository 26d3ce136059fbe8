"""What `chat --web` answers, to whom, and that it stops when nobody listens any more."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toy_run import toy_run
from toys import toy_chat_llama
from web_chat import Served, served

from shardtune.errors import UserInputError
from shardtune.inference.answers import AnsweringModel, AnswerOptions, load_answering, prepare_questions
from shardtune.inference.decoding import Decoder
from shardtune.inference.sampling import Sampling
from shardtune.inference.source import find_tuned
from shardtune.inference.trained_format import trained_format
from shardtune.inference.web import ListenAddress, open_port
from shardtune.report.access import _name

QUESTION = [{"role": "user", "content": "Hello"}]
JSON = {"Content_Type": "application/json"}
BODY = json.dumps({"conversations": {"tuned": QUESTION}, "max_new_tokens": 4})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AnsweringModel:
    folder = tmp_path_factory.mktemp("web")
    tuned = find_tuned(str(toy_run(folder / "run", toy_chat_llama(folder / "base"))))
    return load_answering(prepare_questions(tuned, trained_format(tuned)), torch.device("cpu"))


@pytest.fixture(scope="module")
def site(model: AnsweringModel) -> Iterator[Served]:
    with served(model) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(model: AnsweringModel) -> Iterator[Served]:
    with served(model, "0.0.0.0") as found:
        yield found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tokens take time, and when each was computed is known."""
    computed: list[float] = []
    following = Decoder.next

    def late(self: Decoder) -> int:
        time.sleep(0.01)
        computed.append(time.monotonic())
        token = following(self)
        return token if token not in (0, 1, 2) else 50  # no end comes by itself

    monkeypatch.setattr(Decoder, "next", late)
    return computed


def test_both_sides_answer_together_as_they_do_alone(site: Served, model: AnsweringModel) -> None:
    lines = site.answer(conversations={"base": QUESTION, "tuned": QUESTION}, max_new_tokens=16)
    texts = {
        side: "".join(x["text"] for x in lines if x.get("side") == side and "text" in x) for side in ("base", "tuned")
    }
    for side, text in texts.items():
        reply = model.reply(QUESTION, side, Sampling(), 16)  # type: ignore[arg-type]
        assert "".join(reply) == text
    assert lines[0] == {"sampling": "greedy (temperature 0)"} and texts["base"] != texts["tuned"]
    assert [(x["side"], x["ended"], x["limit"]) for x in lines[-2:]] == [
        ("base", "length", 16),
        ("tuned", "length", 16),
    ]


def test_the_page_learns_how_the_model_is_asked(model: AnsweringModel) -> None:
    options = AnswerOptions(Sampling(0.7, 0.9, 3), system="Be brief.", max_new_tokens=9)
    with served(model, options=options) as site:
        about = json.loads(site.ask("/api/model")[2])
        page = site.ask("/")[2]
    assert about["has_turns"] and about["takes_system"] and about["kind"] == "chat"
    assert about["settings"] == {
        "system": "Be brief.",
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
        "max_new_tokens": 9,
    }
    assert '<script src="/static/chat.js' in page and "<script>" not in page


def test_text_arrives_while_the_rest_is_still_computed(site: Served, slow: list[float]) -> None:
    connection = site.connect()
    connection.request(
        "POST",
        "/api/answer",
        json.dumps({"conversations": {"tuned": QUESTION}, "max_new_tokens": 40}),
        {"Content-Type": "application/json"},
    )
    answer = connection.getresponse()
    while "text" not in json.loads(answer.readline()):
        pass
    assert len(slow) < 38
    answer.read()
    connection.close()
    assert len(slow) == 40


def test_who_asks_meanwhile_is_told_and_a_client_that_leaves_ends_its_answer(site: Served, slow: list[float]) -> None:
    connection = site.connect()
    body = json.dumps({"conversations": {"base": QUESTION, "tuned": QUESTION}, "max_new_tokens": 200})
    connection.request("POST", "/api/answer", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    status, _, text = site.ask("/api/answer", "POST", BODY, **JSON)
    assert status == 409 and "Another answer" in json.loads(text)["error"]
    answer.close()
    connection.close()
    until = time.monotonic() + 30
    while site.ask("/api/answer", "POST", BODY, **JSON)[0] == 409:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(slow) < 200, "of the 400 tokens that were asked for"


def post_of(body: str) -> bytes:
    return (
        "POST /api/answer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


@pytest.mark.parametrize("sent", ["all of it", "a part of it"])
def test_a_client_that_leaves_at_once_is_no_error_and_blocks_nobody(
    sent: str, site: Served, slow: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    request = post_of(json.dumps({"conversations": {"tuned": QUESTION}, "max_new_tokens": 200}))
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", site.port)) as connection:
            connection.sendall(request if sent == "all of it" else request[:-9])
    until = time.monotonic() + 30
    while site.ask("/api/answer", "POST", BODY, **JSON)[0] == 409:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert len(slow) < 150, "of the 1000 tokens that were asked for"
    assert not caplog.records


def test_after_a_stop_the_next_question_waits_for_the_token_that_is_being_computed(
    site: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Decoder.next

    def late(self: Decoder) -> int:
        time.sleep(0.5)
        return following(self)

    monkeypatch.setattr(Decoder, "next", late)
    connection = site.connect()
    connection.request("POST", "/api/answer", BODY, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    answer.close()
    connection.close()
    time.sleep(0.1)
    short = {"conversations": {"tuned": QUESTION}, "max_new_tokens": 1}
    assert site.ask("/api/answer", "POST", json.dumps(short), **JSON)[0] == 200


def test_after_what_is_wrong_it_still_answers(site: Served) -> None:
    wrong: list[tuple[Any, str]] = [
        ("not json", "understood"),
        ({"conversations": {}}, "conversations"),
        ({"conversations": {"other": QUESTION}}, "other"),
        ({"conversations": {"tuned": []}}, "end with a question"),
        ({"conversations": {"tuned": [{"role": "system", "content": "x"}]}}, "role"),
        ({"conversations": {"tuned": [{"role": "user", "content": 7}]}}, "content"),
        ({"conversations": {"tuned": QUESTION}, "nonsense": 1}, "nonsense"),
        ({"conversations": {"tuned": QUESTION}, "temperature": -1}, "temperature"),
        ({"conversations": {"tuned": QUESTION}, "seed": 4}, "no effect"),
        ({"conversations": {"tuned": [{"role": "user", "content": "x" * 400}]}}, "made for 256"),
        ({"conversations": {"tuned": [{"role": "user", "content": "<|im_end|>"}]}}, "cannot render"),
    ]
    for body, said in wrong:
        status, _, text = site.ask("/api/answer", "POST", body if isinstance(body, str) else json.dumps(body), **JSON)
        assert status == 400 and said in json.loads(text)["error"], (body, text)
    assert site.answer(conversations={"tuned": QUESTION}, max_new_tokens=2)[-1]["tokens"] == 2


def test_a_request_that_is_too_large_is_not_read(site: Served) -> None:
    large = json.dumps({"conversations": {"tuned": [{"role": "user", "content": "x" * 600_000}]}})
    assert site.ask("/api/answer", "POST", large, **JSON)[0] == 413


def test_a_failure_while_it_answers_is_told_and_does_not_block_the_next(
    site: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from shardtune.errors import MachineError

    errors = {
        MachineError("The tuned model computes NaN."): "The tuned model computes NaN.",
        RuntimeError("secret"): "RuntimeError: its traceback stands where `shardtune chat` runs.",
        torch.OutOfMemoryError("CUDA out of memory. Tried"): "do not fit into the GPU's memory",
    }
    for error, said in errors.items():

        def broken(self: Decoder, error: Exception = error) -> Any:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(Decoder, "_logits", broken)
            assert said in site.answer(conversations={"tuned": QUESTION}, max_new_tokens=2)[-1]["error"]
    assert "RuntimeError: secret" in caplog.text
    assert site.answer(conversations={"tuned": QUESTION}, max_new_tokens=2)[-1]["tokens"] == 2


FOREIGN = [
    {"Content_Type": "text/plain"}, {"Content_Type": "application/x-www-form-urlencoded"}, {"Content_Type": "text/plain; application/json"},
    {**JSON, "Origin": "http://[evil"}, {**JSON, "Origin": "http://evil.example"}, {**JSON, "Origin": "null"}, {**JSON, "Origin": "http://127.0.0.1:1"},
    {**JSON, "Sec_Fetch_Site": "cross-site"}, {**JSON, "Sec_Fetch_Site": "same-site"}, {**JSON, "Sec_Fetch_Site": "none"},
]  # fmt: skip


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_cannot_make_a_browser_ask(site: Served, headers: dict[str, str]) -> None:
    assert site.ask("/api/answer", "POST", BODY, **headers)[0] in (403, 415)


def test_its_own_page_and_programs_can(site: Served) -> None:
    own = {**JSON, "Origin": f"http://127.0.0.1:{site.port}", "Sec_Fetch_Site": "same-origin"}
    assert site.ask("/api/answer", "POST", BODY, **own)[0] == 200
    assert site.ask("/api/answer", "POST", BODY, Content_Type="application/json; charset=utf-8")[0] == 200


def test_only_that_address_takes_a_post_and_nothing_else_is_taken(site: Served) -> None:
    for path in ("/", "/api/model", "/static/chat.js", "/api/answer/", "/nothing"):
        status, headers, _ = site.ask(path, "POST", BODY, **JSON)
        assert status == 405 and headers["allow"] == "GET, HEAD"
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert site.ask("/api/answer", method)[0] == 405
    assert site.ask("/api/answer")[0] == 405
    for path in ("/static/../web.py", "/static/%2e%2e%2fweb.py", "/static/page.js"):
        assert site.ask(path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80"])
def test_under_another_host_name_nothing_is_answered(site: Served, host: str) -> None:
    assert _name(host) not in ("127.0.0.1", "localhost")
    assert site.ask("/api/model", Host=host)[0] == 421
    assert site.ask("/api/answer", "POST", BODY, **JSON, Host=host)[0] == 421


def test_every_answer_forbids_foreign_scripts_and_frames(site: Served) -> None:
    for path in ("/", "/api/model", "/static/chat.js", "/nothing"):
        policy = site.ask(path)[1]["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy


def test_from_other_machines_a_token_is_needed_also_to_ask(guarded: Served) -> None:
    token = guarded.token
    assert token is not None and len(token) >= 24
    for path in ("/", "/api/model", "/static/chat.js"):
        assert guarded.ask(path)[0] == 401
    assert guarded.ask("/api/answer", "POST", BODY, **JSON)[0] == 401
    assert guarded.ask(f"/api/answer?token={token}", "POST", BODY, **JSON)[0] == 401, (
        "it does not belong into the address"
    )
    assert guarded.ask("/api/answer", "POST", BODY, **JSON, Authorization=f"Bearer {token}")[0] == 200
    status, headers, _ = guarded.ask(f"/?token={token}")
    cookie = headers["set-cookie"].partition(";")[0]
    assert status == 303 and headers["location"] == "/" and cookie.startswith(f"shardtune-token-{guarded.port}=")
    assert guarded.ask("/api/answer", "POST", BODY, **JSON, Cookie=cookie)[0] == 200
    foreign = {**JSON, "Cookie": cookie, "Origin": "http://evil.example"}
    assert guarded.ask("/api/answer", "POST", BODY, **foreign)[0] == 403
    other = cookie.replace(str(guarded.port), "8765")
    assert guarded.ask("/api/model", Cookie=other)[0] == 401, "that of another site on this machine"


@pytest.mark.parametrize(("token", "is_right"), [("a+b/c=d&e#f", True), ("short", False), ("пароль12", False)])
def test_a_token_of_ones_own_works_as_it_is_printed(token: str, is_right: bool, model: AnsweringModel) -> None:
    if not is_right:
        with pytest.raises(UserInputError, match="--token"):
            open_port(ListenAddress(port=0, token=token))
        return
    with served(model, token=token) as site:
        path = site.printed.partition(f":{site.port}")[2]
        cookie = site.ask(path)[1]["set-cookie"].partition(";")[0]
        assert site.ask("/api/model", Cookie=cookie)[0] == 200


def test_a_server_that_is_told_to_end_ends_its_answer_too_and_has_nothing_to_complain(
    model: AnsweringModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    computed = []

    def late(self: Decoder) -> int:
        computed.append(time.monotonic())
        time.sleep(0.5)
        return 50

    monkeypatch.setattr(Decoder, "next", late)
    with served(model) as site:
        connection = site.connect()
        connection.request("POST", "/api/answer", BODY, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
    answer.read()
    connection.close()
    time.sleep(0.6)
    assert len(computed) <= 2 and not caplog.records


def test_without_a_port_a_free_one_is_taken_where_the_usual_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("shardtune.inference.web.DEFAULT_PORT", port)
        address = open_port(ListenAddress())
        assert address.listening.getsockname()[1] not in (0, port)
        address.listening.close()
        with pytest.raises(UserInputError, match=f"port {port}"):
            open_port(ListenAddress(port=port))
        with pytest.raises(UserInputError, match=f"192.0.2.1, port {port}"):
            open_port(ListenAddress(host="192.0.2.1"))
