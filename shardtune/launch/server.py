"""What does the master's port serve? The table and the ranks' store, to launchers that prove the secret.

Every other connection is closed. The ranks' store is torch's TCPStore and listens on loopback only.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

from shardtune.launch import handshake
from shardtune.launch.handshake import UnauthenticatedError
from shardtune.launch.listener import ListenerThread, splice

LARGEST_FRAME = 64 << 20  # bytes; of launchers that have proven the secret
_HALF_OPEN = 4096  # handshakes at a time; beyond that the oldest is closed, so that silent peers block nobody
_FILES = 1 << 16  # a rank of another node holds three descriptors here; the usual limit is 1,024
_NAMED = 64  # addresses of refused connections that are logged


class Table:
    """The key-value table that launchers share. Used from the launcher's main thread and from the server's."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> str | None:
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, value: str) -> str:
        """Set it unless it is set; returns its value."""
        with self._lock:
            return self._values.setdefault(key, value)


class MasterServer:
    """The master's port. `ranks_port` is that of the ranks' store on loopback."""

    def __init__(
        self, listener: socket.socket, table: Table, key: bytes, ranks_port: int, log: Callable[[str], None]
    ) -> None:
        self._table, self._key, self.ranks_port, self._log = table, key, ranks_port, log
        self._half_open: dict[asyncio.Task[None], None] = {}
        self._named: set[str] = set()
        self.most_half_open = min(_HALF_OPEN, _allow_many_files() // 4)
        self._thread = ListenerThread(listener, self._serve, "shardtune-server")

    def close(self) -> None:
        self._thread.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername") or ("an unknown address",)
        address = str(peer[0]).removeprefix("::ffff:")  # IPv4 on a socket for both
        try:
            role = await self._admit(reader, writer)
        except UnauthenticatedError as error:
            writer.write(error.reply)
            self._report(address, str(error))
        except TimeoutError:
            self._report(address, f"it did not finish the handshake within {handshake.SECONDS:.0f} s")
        else:
            if role == handshake.TUNNEL:
                await splice((reader, writer), await asyncio.open_connection("127.0.0.1", self.ranks_port))
            else:
                await self._answer(reader, writer)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The role the other end has proven.

        Raises:
            UnauthenticatedError, TimeoutError, EOFError, OSError: it has proven nothing.
        """
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        if len(self._half_open) >= self.most_half_open:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.cancel()
        self._half_open[task] = None
        try:
            async with asyncio.timeout(handshake.SECONDS):
                hello = await reader.readexactly(handshake.HELLO_SIZE)
                reply, expected = handshake.answer(self._key, hello)
                writer.write(reply)
                try:
                    proof = await reader.readexactly(handshake.PROOF_SIZE)
                except EOFError:  # with another secret it has seen from our proof that the secrets differ
                    proof = b""
                handshake.check_proof(expected, proof)
                writer.write(handshake.ACCEPTED)
                return handshake.role_of(hello)
        finally:
            self._half_open.pop(task, None)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of a launcher, until it leaves."""
        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > LARGEST_FRAME:
                return
            request = json.loads(await reader.readexactly(size))
            writer.write(frame({"value": self._do(**request)}))
            await writer.drain()

    def _do(self, op: str, key: str, value: str = "") -> str | None:
        if op == "get":
            return self._table.get(key)
        if op == "add":
            return self._table.add(key, value)
        self._table.set(key, value)
        return None

    def _report(self, address: str, reason: str) -> None:
        if address not in self._named and len(self._named) < _NAMED:
            self._named.add(address)
            self._log(f"refused a connection from {address}: {reason}. Further ones from that address are not logged")


def frame(content: dict[str, Any]) -> bytes:
    """A message of the table's protocol: its size in four bytes, and JSON."""
    data = json.dumps(content).encode()
    return len(data).to_bytes(4, "big") + data


def _allow_many_files() -> int:
    """How many descriptors this process may have: raised as far as needed and allowed."""
    soft, hard = (
        _FILES if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < min(_FILES, hard):
        soft = min(_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return soft
