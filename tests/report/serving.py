"""How tests start a dashboard as a user does, ask it, and end it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Dashboard:
    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer; the path is sent as it is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            given = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, given, answer.read().decode("utf-8")
        finally:
            connection.close()

    def json(self, path: str) -> dict[str, Any]:
        status, _, text = self.ask(path)
        assert status == 200, text
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    def end(self) -> tuple[int, str, str]:
        """Ctrl-C; exit code and what it said."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def dashboard(environment: dict[str, str], runs: Path, *options: str) -> Iterator[Dashboard]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", "dashboard", str(runs), "--port", "0", *options],
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs tests in the background has Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://\S+", first)
        assert found, first + (process.stderr.read() if process.stderr and process.poll() is not None else "")
        yield Dashboard(process, found[0])
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
