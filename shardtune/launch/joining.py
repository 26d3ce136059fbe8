"""How does a node get its connection to the master? It tries until the master is there; every wait hears signals."""

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

_CONNECT = 5.0  # seconds for one address
_MUTE = "it accepts connections and sends nothing"
_SLICE = 0.1  # seconds between two looks at signals


def connect_to_master(
    master: str, port: int, key: bytes, seconds: float, say: Callable[[str], None], idle: Callable[[], None]
) -> socket.socket:
    """A connection on which both ends have proven the secret; pods start at different times, so a refusal is no answer.

    Args:
        idle: Called while waiting; may raise (a signal came).

    Raises:
        UserInputError: no master answered within `seconds` (says what was seen last), or it has another secret.
    """
    search = _Search(master, port, seconds, say, idle)
    while True:
        try:
            return _handshake(search, _connect(search), key)
        except OSError as error:
            search.seen = _problem(error, master, port)
        except NotAMasterError as error:
            search.seen = _other_listener(master, port, str(error))
        if search.waited >= seconds:
            raise UserInputError(
                f"The master {master}:{port} was not reached within {search.waited:.0f} s.",
                why=search.seen,
                fix="Check --master-addr and --master-port, that node 0 is started, and that no firewall is between. "
                "parallel.join_timeout_minutes is how long a node waits.",
            )
        search.pause(min(0.5, seconds / 10))


class _Search:
    """What has been seen of the master so far, said after 3 s and then every 30 s."""

    def __init__(
        self, master: str, port: int, seconds: float, say: Callable[[str], None], idle: Callable[[], None]
    ) -> None:
        self.master, self.port = master, port
        self.seen = "No answer yet."
        self._seconds, self._say, self._idle = seconds, say, idle
        self._began, self._next = time.monotonic(), 3.0

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def tick(self) -> None:
        self._idle()
        if self.waited >= self._next:
            self._next = self.waited + 30.0
            self._say(f"waiting for the master {self.master}:{self.port} since {self.waited:.0f} s: {self.seen}")

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.tick()
            time.sleep(min(_SLICE, seconds))

    def deadline(self, seconds: float) -> float:
        """So many seconds from now, or the end of the whole search."""
        return time.monotonic() + max(0.1, min(seconds, self._seconds - self.waited))

    def wait(self, connection: socket.socket, event: int, deadline: float) -> None:
        """Until the socket is ready. Raises TimeoutError."""
        poll = select.poll()
        poll.register(connection, event)
        while True:
            self.tick()
            if poll.poll(_SLICE * 1000):
                return
            if time.monotonic() > deadline:
                raise TimeoutError


def _connect(search: _Search) -> socket.socket:
    last: OSError = TimeoutError()
    for family, kind, protocol, _, address in _addresses(search):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            problem = connection.connect_ex(address)
            if problem == errno.EINPROGRESS:
                search.wait(connection, select.POLLOUT, search.deadline(_CONNECT))
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


def _addresses(search: _Search) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """Of the master's name. A resolver may take half a minute and hears no signal, so it is asked in a thread."""
    answer: list[object] = []

    def ask() -> None:
        try:
            answer.append(socket.getaddrinfo(search.master, search.port, type=socket.SOCK_STREAM))
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="shardtune-resolver", daemon=True)
    thread.start()
    deadline = search.deadline(60.0)
    while thread.is_alive():
        search.tick()
        if time.monotonic() > deadline:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer from the name server")
        thread.join(_SLICE)
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]


def _handshake(search: _Search, connection: socket.socket, key: bytes) -> socket.socket:
    search.seen = _other_listener(search.master, search.port, _MUTE)
    deadline = search.deadline(handshake.SECONDS)
    try:
        hello = handshake.hello(handshake.KEY_VALUE)
        connection.sendall(hello)
        reply = _receive(search, connection, handshake.REPLY_SIZE, deadline)
        connection.sendall(handshake.check_reply(key, hello, reply, f"{search.master}:{search.port}"))
        if _receive(search, connection, len(handshake.ACCEPTED), deadline) != handshake.ACCEPTED:
            raise NotAMasterError("it stopped in the middle of the handshake")
    except (ConnectionResetError, BrokenPipeError):
        connection.close()
        raise NotAMasterError("it closes the connection at once") from None
    except TimeoutError:
        connection.close()
        raise NotAMasterError(_MUTE) from None
    except BaseException:
        connection.close()
        raise
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def _receive(search: _Search, connection: socket.socket, size: int, deadline: float) -> bytes:
    """`size` bytes, or fewer when the other end closes or goes silent after some. Raises TimeoutError."""
    data = b""
    while len(data) < size:
        try:
            search.wait(connection, select.POLLIN, deadline)
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
    return f"Something listens on {master}:{port} but does not answer like a shardtune master: {how}."


def _problem(error: OSError, master: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return f"The name '{master}' does not resolve to an address ({error.strerror})."
    if isinstance(error, ConnectionRefusedError):
        return f"The machine answers, but nothing listens on port {port} (connection refused)."
    if isinstance(error, TimeoutError):
        return "No answer at all (timed out): a wrong address, a machine that is off, or a firewall."
    return f"{error.strerror or error}."
