"""What does `shardtune chat --web` serve? A page, a description of the model, and answers as they are generated.

The conversation is kept by the page: a request has all of it. One answer is generated at a time, since base and tuned
model share their weights; whoever asks meanwhile is told so.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shardtune import terminal
from shardtune.data.messages import Message
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.inference.answers import (
    DEFAULT_NEW_TOKENS,
    AnsweringModel,
    AnswerOptions,
    Questions,
    Reply,
    SideName,
    check_system,
    load_answering,
    named_device,
    prepare_questions,
    with_system,
)
from shardtune.inference.sampling import Sampling
from shardtune.inference.screen import announce, announce_choice, interleaved, notes, stderr_console
from shardtune.inference.source import TunedModel
from shardtune.inference.trained_format import TrainedFormat
from shardtune.report.access import AccessMiddleware, Site
from shardtune.report.chat_servers import ChatServer, recorded
from shardtune.report.page import asset, shell
from shardtune.report.server import Address, listen, serve_site, static_route
from shardtune.run.exit_codes import DONE

log = logging.getLogger(__name__)

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8766
ANSWER = "/api/answer"
SITE = Site(command="shardtune chat --web", posts=frozenset({ANSWER}))
_SCRIPTS, _STYLES = ("elements.js", "chat.js"), ("style.css", "chat.css")
_OWN = ("chat.js", "chat.css")  # the others are the report's
_MOST_BYTES = 512 << 10  # of a request: a conversation of some hundred pages


class ChatMessage(BaseModel):
    """One message of a conversation; the system prompt is apart."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["user", "assistant"]
    content: str


class AnswerRequest(BaseModel):
    """What the page asks for.

    Attributes:
        conversations: Of each side that is to answer; the last message is the question.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    conversations: dict[SideName, list[ChatMessage]] = Field(min_length=1)
    system: str | None = None
    temperature: float = 0.0
    top_p: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = Field(default=None, ge=1)


Lines = asyncio.Queue[dict[str, Any] | None]


@dataclass(frozen=True)
class Generation:
    """Answers that are about to be generated, and how they can be stopped."""

    replies: Sequence[Reply]
    sampling: Sampling
    stop: threading.Event


class AnswerResponse(StreamingResponse):
    """Lines of JSON. Whoever goes away before the last of them stops the answer, even before the first is sent."""

    def __init__(self, lines: Lines, stop: threading.Event) -> None:
        super().__init__(_sent(lines), media_type="application/x-ndjson", headers={"Cache-Control": "no-store"})
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stop.set()


async def _sent(lines: Lines) -> AsyncIterator[bytes]:
    while (line := await lines.get()) is not None:
        yield json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class ChatApi:
    """Answers requests of the page, one at a time."""

    def __init__(self, model: AnsweringModel, options: AnswerOptions) -> None:
        self.model, self.options = model, options
        self._free = threading.Lock()
        self._stop = threading.Event()  # of the answer that is being generated
        self._cut: Callable[[], None] = lambda: None  # ends its response
        # A thread that is not a daemon: the interpreter waits for it, and it ends at its next token.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answer")

    def about(self) -> dict[str, Any]:
        """What the page shows of the model, and the settings it begins with."""
        questions, options, base = self.model.questions, self.options, self.model.loaded.model.get_base_model()
        tuned = questions.tuned
        return {
            "name": tuned.name,
            "adapter": str(tuned.adapter),
            "base": tuned.base.model_name_or_path,
            "asked": questions.format.description,
            "computed": f"{self.model.loaded.device.type}, {str(base.dtype).removeprefix('torch.')}",
            "kind": questions.format.kind,
            "has_turns": questions.format.has_turns,
            "takes_system": _takes_system(questions),
            "default_system": questions.format.default_system,
            "columns": list(questions.format.asked),
            "notes": [f"{note[0].upper()}{note[1:]}." for note in notes(questions, compare=True)],
            "default_new_tokens": DEFAULT_NEW_TOKENS,
            "settings": {
                "system": options.system or "",
                "temperature": options.sampling.temperature,
                "top_p": options.sampling.top_p if options.sampling.top_p < 1 else None,
                "seed": options.sampling.seed,
                "max_new_tokens": options.max_new_tokens,
            },
        }

    def end(self) -> None:
        """The server ends, and the response without waiting for the token that is being computed."""
        self._stop.set()
        self._cut()

    async def answer(self, request: Request) -> Response:
        """Lines of JSON: pieces of text by side, then how each side ended."""
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        if body is None:
            return _refusal(413, f"The conversation is too long for a request ({_MOST_BYTES >> 10} KiB).")
        while not self._free.acquire(blocking=False):
            if not self._stop.is_set():
                text = "Another answer is being generated: the model gives one at a time. Try again soon."
                return _refusal(409, text)
            await asyncio.sleep(0.02)  # the one that was stopped ends at its next token
        started = False
        try:
            begun = self._begin(AnswerRequest.model_validate_json(body))
            lines = self._start(begun)
            started = True
        except (ValidationError, UserInputError) as error:
            return _refusal(400, _in_words(error))
        finally:
            if not started:
                self._free.release()
        return AnswerResponse(lines, begun.stop)

    def _begin(self, asked: AnswerRequest) -> Generation:
        sampling = Sampling.checked(asked.temperature, asked.top_p, asked.seed).seeded()
        self._stop = stop = threading.Event()
        replies = []
        for side, said in asked.conversations.items():
            messages: list[Message] = [message.model_dump() for message in said]
            if not messages or messages[-1]["role"] != "user":
                raise UserInputError("The conversation does not end with a question.")
            messages = with_system(messages, asked.system)
            replies.append(self.model.reply(messages, side, sampling, asked.max_new_tokens, stop.is_set))
        return Generation(replies, sampling, stop)

    def _start(self, begun: Generation) -> Lines:
        """Begin to generate in the thread; the lines come through a queue, and None is the last."""
        loop, lines = asyncio.get_running_loop(), Lines()

        def put(line: dict[str, Any] | None) -> None:
            if not loop.is_closed():  # a server that was told to end waits for no more lines
                loop.call_soon_threadsafe(lines.put_nowait, line)

        def work() -> None:
            try:
                self._generate(begun, put)
            except ShardtuneError as error:
                put({"error": _in_words(error)})
            except Exception as error:
                put({"error": f"{type(error).__name__}: its traceback stands where `shardtune chat` runs."})
                log.exception("The answer failed.")
            finally:
                self._free.release()
                put(None)

        self._cut = lambda: put(None)
        self._thread.submit(work)
        return lines

    def _generate(self, begun: Generation, put: Callable[[dict[str, Any]], None]) -> None:
        put({"sampling": str(begun.sampling)})
        for reply, piece in interleaved(begun.replies):
            put({"side": reply.side.name, "text": piece})
        for reply in begun.replies:
            put({"side": reply.side.name, "ended": reply.ended, "tokens": reply.tokens, "limit": reply.limit})


def _takes_system(questions: Questions) -> bool:
    try:
        check_system(questions, "?")
    except UserInputError:
        return False
    return True


async def _body(request: Request) -> bytes | None:
    """None: it is too large; nothing more of it is read."""
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > _MOST_BYTES:
            return None
    return found


def _refusal(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, headers={"Cache-Control": "no-store"})


def _in_words(error: Exception) -> str:
    if isinstance(error, ShardtuneError):
        return " ".join(part for part in (error.what, error.why, error.fix) if part)
    assert isinstance(error, ValidationError)
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"The request is not understood: {place + ': ' if place else ''}{first['msg']}."


def application(api: ChatApi, names: Sequence[str], token: str | None) -> Starlette:
    """The site of one model."""
    texts = {name: _own(name) if name in _OWN else asset(name) for name in (*_SCRIPTS, *_STYLES)}
    static, version = static_route(texts)
    title = f"{api.model.questions.tuned.name} · chat"
    empty = shell(_SCRIPTS, version, mode="chat", title=title, styles=_STYLES)

    def page(request: Request) -> Response:
        return HTMLResponse(empty, headers={"Cache-Control": "no-cache"})

    def about(request: Request) -> Response:
        return JSONResponse(api.about(), headers={"Cache-Control": "no-store"})

    routes = [
        Route("/", page),
        static,
        Route("/api/model", about),
        Route(ANSWER, api.answer, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(AccessMiddleware, names=names, token=token, site=SITE)])


def _own(name: str) -> str:
    return (files("shardtune.inference") / "assets" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class ListenAddress:
    """Where to serve: None: the usual address, and any free port where the usual one is taken."""

    host: str | None = None
    port: int | None = None
    token: str | None = None


def open_port(where: ListenAddress) -> Address:
    """Raises UserInputError where that cannot be listened on."""
    host, what = where.host or DEFAULT_HOST, "The chat"
    if where.port is not None:
        return listen(host, where.port, where.token, what)
    try:
        return listen(host, DEFAULT_PORT, where.token, what)
    except UserInputError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
            raise
        return listen(host, 0, where.token, what)


def serve_chat(tuned: TunedModel, trained: TrainedFormat, options: AnswerOptions, where: ListenAddress) -> int:
    """Serves the page until Ctrl-C; returns the exit code.

    Raises:
        UserInputError: the model cannot be loaded or asked, or the address cannot be used.
    """
    device = named_device(options.device)
    questions = prepare_questions(tuned, trained)
    check_system(questions, options.system)
    address = open_port(where)  # before minutes of loading
    console = stderr_console()
    announce(console, questions, compare=True, system=options.system)
    if options.compare:
        terminal.say(console, "notice", "--compare: the page shows base and tuned model in any case")
    model = load_answering(questions, device)
    limit = f"up to {options.max_new_tokens or DEFAULT_NEW_TOKENS} new tokens an answer (the page can set others)"
    announce_choice(console, model, options.sampling, limit)
    api = ChatApi(model, options)
    site = application(api, address.names, address.token)
    plain = address.url.partition("?")[0]
    with recorded(tuned.run or tuned.adapter, ChatServer(plain, needs_token=address.token is not None)):
        serve_site(site, address, lambda: print(f"Chat: {address.url}\nPress Ctrl-C to stop.", flush=True), api.end)
    print("Chat stopped.")
    return DONE
