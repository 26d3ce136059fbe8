"""How does a launcher accept connections? In one thread, in pure Python, that can be ended and joined.

No call into C++ that has to be unwound at interpreter exit, and nothing that a silent peer could block.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Awaitable, Callable

from shardtune.errors import UserInputError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_BACKLOG = 4096  # thousands of ranks may connect in the same second
_CHUNK = 1 << 16
_JOIN = 5.0  # seconds


class ListenerThread:
    """Serves every connection to `listener` with `serve` until `close`. Owns the socket."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        name: str,
    ) -> None:
        self._listener, self._serve = listener, serve
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut all connections and wait for the thread. May be called again."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_JOIN)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its end cancels what is still open
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._guarded, sock=self._listener, backlog=_BACKLOG)
        await self._end.wait()
        server.close()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            keep_alive(writer.get_extra_info("socket"))
            await self._serve(reader, writer)
        except (OSError, EOFError):  # the peer has gone
            pass
        except asyncio.CancelledError:  # by `close` or `serve` itself; Python 3.11 would log it as an error
            pass
        finally:
            writer.close()


def listen(address: str, port: int) -> socket.socket:
    """A listening socket; an empty address means all interfaces.

    Raises:
        UserInputError: the port is in use.
    """
    try:
        if not address and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise UserInputError(
            f"The master cannot listen on port {port} of {socket.gethostname()}.",
            why="Another process (an earlier run?) is already listening on it."
            if error.errno == errno.EADDRINUSE
            else "This user has no permission to use that port.",
            fix="Choose another --master-port on all nodes.",
            code="port-in-use",
        ) from None


def keep_alive(connection: socket.socket) -> None:
    """Notice within some minutes that a peer's machine is gone, so that its connections do not pile up."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def splice(one: Streams, other: Streams) -> None:
    """Forward bytes in both directions until either end closes."""
    copies = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        one[1].close()
        other[1].close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        target.write(data)
        await target.drain()
