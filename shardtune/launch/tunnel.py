"""How do ranks reach their store on the master? Over loopback to their launcher, which proves the secret for them."""

from __future__ import annotations

import asyncio
import random

from shardtune.errors import ShardtuneError
from shardtune.launch import handshake
from shardtune.launch.handshake import NotAMasterError
from shardtune.launch.listener import ListenerThread, Streams, keep_alive, listen, splice

_TRIES = 6  # within half a minute: when thousands of ranks connect in one second, some have to wait


class Tunnel:
    """Listens on a loopback port and forwards every connection to the store behind the master's port."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """`address` is numeric: a name would be resolved in yet another thread."""
        self._address, self._port, self._key = address, port, key
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self._thread = ListenerThread(listener, self._serve, "shardtune-tunnel")

    def close(self) -> None:
        self._thread.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for trial in range(_TRIES):
            await asyncio.sleep(random.uniform(0, 2**trial) if trial else 0)
            try:
                master = await self._connect()
            except (OSError, EOFError, NotAMasterError, ShardtuneError):
                continue  # in the end the rank's connection is closed; the launcher reports what happened to the master
            await splice((reader, writer), master)
            return

    async def _connect(self) -> Streams:
        async with asyncio.timeout(handshake.SECONDS):
            reader, writer = await asyncio.open_connection(self._address, self._port)
            try:
                hello = handshake.hello(handshake.TUNNEL)
                writer.write(hello)
                reply = await reader.readexactly(handshake.REPLY_SIZE)
                writer.write(handshake.check_reply(self._key, hello, reply, self._address))
                await reader.readexactly(len(handshake.ACCEPTED))
            except BaseException:
                writer.close()
                raise
        keep_alive(writer.get_extra_info("socket"))
        return reader, writer
