"""How tests serve the chat's page in this process, and ask it."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardtune.inference.answers import AnsweringModel, AnswerOptions
from shardtune.inference.sampling import Sampling
from shardtune.inference.web import ChatApi, application
from shardtune.report.server import SiteServer, listen


@dataclass
class Served:
    port: int
    token: str | None
    printed: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, path: str, method: str = "GET", body: str | bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer; header names with `_` for `-`."""
        connection = self.connect()
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def answer(self, **body: Any) -> list[dict[str, Any]]:
        status, _, text = self.ask("/api/answer", "POST", json.dumps(body), Content_Type="application/json")
        assert status == 200, text
        return [json.loads(line) for line in text.splitlines()]


@contextmanager
def served(
    model: AnsweringModel, host: str = "127.0.0.1", options: AnswerOptions | None = None, token: str | None = None
) -> Iterator[Served]:
    address = listen(host, 0, token, "The chat")
    api = ChatApi(model, options or AnswerOptions(Sampling()))
    server = SiteServer(application(api, address.names, address.token), api.end)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.listening]})
    thread.start()
    try:
        until = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        yield Served(address.listening.getsockname()[1], address.token, address.url)
    finally:
        server.handle_exit(signal.SIGINT, None)
        thread.join(30)
        address.listening.close()
