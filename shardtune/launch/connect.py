"""How does a node connect to the master? It retries until the master answers; signals are handled during every wait."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from shardtune.errors import UserInputError
from shardtune.launch import handshake
from shardtune.launch.handshake import NotAMasterError
from shardtune.launch.listener import keep_alive

_CONNECT_SECONDS = 5.0  # for one address
_NO_REPLY = "it accepts connections and sends nothing"
_POLL_SECONDS = 0.1  # between two checks for signals


def connect_to_master(
    master: str, port: int, key: bytes, seconds: float, log: Callable[[str], None], idle: Callable[[], None]
) -> socket.socket:
    """A connection on which both ends have proven the secret; pods start at different times, so refusals are retried.

    Args:
        idle: Called while waiting; may raise (a signal came).

    Raises:
        UserInputError: no master answered within `seconds` (with the last problem), or it has another secret.
    """
    loop = _ConnectLoop(master, port, seconds, log, idle)
    while True:
        try:
            return _handshake(loop, _connect(loop), key)
        except OSError as error:
            loop.problem = _problem(error, master, port)
        except NotAMasterError as error:
            loop.problem = _other_listener(master, port, str(error))
        if loop.waited >= seconds:
            raise UserInputError(
                f"Could not connect to the master {master}:{port} within {loop.waited:.0f} s.",
                why=loop.problem,
                fix="Check --master-addr and --master-port, that node 0 is running, and that no firewall blocks the "
                "port. parallel.join_timeout_minutes sets how long a node waits.",
                code="node-missing",
            )
        loop.pause(min(0.5, seconds / 10))


class _ConnectLoop:
    """The last problem of connecting to the master, logged after 3 s and then every 30 s."""

    def __init__(
        self, master: str, port: int, seconds: float, log: Callable[[str], None], idle: Callable[[], None]
    ) -> None:
        self.master, self.port = master, port
        self.problem = "No answer yet."
        self._seconds, self._log, self._idle = seconds, log, idle
        self._began, self._next = time.monotonic(), 3.0

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def tick(self) -> None:
        self._idle()
        if self.waited >= self._next:
            self._next = self.waited + 30.0
            self._log(f"waiting for the master {self.master}:{self.port} since {self.waited:.0f} s: {self.problem}")

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tick()
            time.sleep(min(_POLL_SECONDS, seconds))

    def deadline(self, seconds: float) -> float:
        """`seconds` from now, or the end of the whole wait."""
        return time.monotonic() + max(0.1, min(seconds, self._seconds - self.waited))

    def wait(self, connection: socket.socket, event: int, deadline: float) -> None:
        """Until the socket is ready. Raises TimeoutError."""
        poll = select.poll()
        poll.register(connection, event)
        while True:
            self.tick()
            if poll.poll(_POLL_SECONDS * 1000):
                return
            if time.monotonic() > deadline:
                raise TimeoutError


def _connect(loop: _ConnectLoop) -> socket.socket:
    last: OSError = TimeoutError()
    for family, kind, protocol, _, address in _addresses(loop):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            problem = connection.connect_ex(address)
            if problem == errno.EINPROGRESS:
                loop.wait(connection, select.POLLOUT, loop.deadline(_CONNECT_SECONDS))
                problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise OSError(problem, os.strerror(problem))
            return connection
        except OSError as error:
            connection.close()
            last = error
        except BaseException:
            connection.close()
            raise
    raise last


def _addresses(loop: _ConnectLoop) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """Resolves the master's name. That may block for half a minute without handling signals, so a thread does it."""
    answer: list[object] = []

    def ask() -> None:
        try:
            answer.append(socket.getaddrinfo(loop.master, loop.port, type=socket.SOCK_STREAM))
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="shardtune-resolver", daemon=True)
    thread.start()
    deadline = loop.deadline(60.0)
    while thread.is_alive():
        loop.tick()
        if time.monotonic() > deadline:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer from the name server")
        thread.join(_POLL_SECONDS)
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]


def _handshake(loop: _ConnectLoop, connection: socket.socket, key: bytes) -> socket.socket:
    loop.problem = _other_listener(loop.master, loop.port, _NO_REPLY)
    deadline = loop.deadline(handshake.SECONDS)
    try:
        hello = handshake.hello(handshake.KEY_VALUE)
        connection.sendall(hello)
        reply = _receive(loop, connection, handshake.REPLY_SIZE, deadline)
        connection.sendall(handshake.check_reply(key, hello, reply, f"{loop.master}:{loop.port}"))
        if _receive(loop, connection, len(handshake.ACCEPTED), deadline) != handshake.ACCEPTED:
            raise NotAMasterError("it stopped during the handshake")
    except (ConnectionResetError, BrokenPipeError):
        connection.close()
        raise NotAMasterError("it closes the connection immediately") from None
    except TimeoutError:
        connection.close()
        raise NotAMasterError(_NO_REPLY) from None
    except BaseException:
        connection.close()
        raise
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def _receive(loop: _ConnectLoop, connection: socket.socket, size: int, deadline: float) -> bytes:
    """`size` bytes, or fewer when the other end closes or stops sending. Raises TimeoutError."""
    data = b""
    while len(data) < size:
        try:
            loop.wait(connection, select.POLLIN, deadline)
        except TimeoutError:
            if not data:
                raise
            break
        more = connection.recv(size - len(data))
        if not more:
            break
        data += more
    return data


def _other_listener(master: str, port: int, how: str) -> str:
    return f"Something is listening on {master}:{port}, but it is not a shardtune master: {how}."


def _problem(error: OSError, master: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return f"The name '{master}' does not resolve to an address ({error.strerror})."
    if isinstance(error, ConnectionRefusedError):
        return f"Connection refused: the host is up, but nothing is listening on port {port}."
    if isinstance(error, TimeoutError):
        return "Timed out without any reply: a wrong address, a host that is down, or a firewall."
    return f"{error.strerror or error}."
