"""How is a command's output read from a container? Over a websocket, as bytes: tar archives pass through unharmed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardtune.cluster.api_errors import Call, api_error, first_words
from shardtune.cluster.connection_errors import StreamCutError, connection_error
from shardtune.cluster.kubeconfig import Access

_STDOUT, _STDERR, _STATUS = 1, 2, 3
_SILENT_SECONDS = 120.0
_KEPT_STDERR = 16_384


class Execution:
    """A command that runs in a container. Iterate over it for its standard output, once; then `exit_code` and `stderr`
    are what it left. A context manager: leaving it closes the connection, which ends the command."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.stderr = b""
        self.exit_code: int | None = None
        self.message = ""
        self.was_refused = False  # the command did not even start: `message` says why

    @classmethod
    def start(cls, access: Access, url: str, credentials: dict[str, str], call: Call) -> Execution:
        import websocket
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url

        try:
            socket = create_websocket(access.configuration, get_websocket_url(url), credentials)
        except websocket.WebSocketBadStatusException as error:
            raise api_error(call, error.status_code, error.resp_body or b"") from None
        except (websocket.WebSocketException, OSError) as error:
            raise connection_error(access, error) from None
        socket.settimeout(_SILENT_SECONDS)
        return cls(socket)

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def __iter__(self) -> Iterator[bytes]:
        import websocket

        while self.exit_code is None:
            try:
                opcode, frame = self._socket.recv_data_frame(True)
            except (websocket.WebSocketException, OSError) as error:
                raise StreamCutError(
                    "The connection to the container was lost before the command ended.", why=str(error)
                ) from None
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                raise StreamCutError("The connection to the container was closed before the command ended.")
            if opcode not in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) or not frame.data:
                continue
            channel, data = frame.data[0], frame.data[1:]
            if channel == _STDOUT and data:
                yield data
            elif channel == _STDERR:
                self.stderr = (self.stderr + data)[-_KEPT_STDERR:]
            elif channel == _STATUS and data:
                self._end(data)

    def _end(self, data: bytes) -> None:
        """The last message: a Status, whose cause is the exit code unless that is 0."""
        try:
            status = dict(json.loads(data))
        except (ValueError, TypeError):  # words of something between us and the container
            status = {"message": data.decode("utf-8", "replace")}
        self.message = first_words(str(status.get("message") or "").strip())
        causes = (status.get("details") or {}).get("causes") or ()
        codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
        self.was_refused = status.get("status") != "Success" and not codes
        self.exit_code = 0 if status.get("status") == "Success" else (codes[0] if codes else 1)
