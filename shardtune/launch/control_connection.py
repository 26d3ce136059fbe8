"""How do the launchers of several nodes communicate? Through a key-value table on the master; all waits time out."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardtune.errors import ShardtuneError
from shardtune.launch.connect import connect_to_master
from shardtune.launch.listener import listen
from shardtune.launch.network import Network
from shardtune.launch.process_role import Node
from shardtune.launch.server import LARGEST_FRAME, MasterServer, Table, frame
from shardtune.launch.tunnel import Tunnel
from shardtune.run.exit_codes import LOST

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
_JOIN = 5.0  # seconds


class MasterLostError(ShardtuneError):
    """The master no longer answers."""

    exit_code = LOST
    code = "node-lost"


class KeyValue(Protocol):
    """The table on the master, local or remote."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> str | None: ...

    def add(self, key: str, value: str) -> str: ...


class ControlConnection(ABC):
    """A launcher's access to the table. `port` is the master's, `store_port` that of the ranks' store on loopback."""

    port: int
    store_port: int

    @abstractmethod
    def call(self, action: Callable[[KeyValue], T], seconds: float, idle: Callable[[], None]) -> T:
        """What `action` returns; `idle` is called while waiting and may raise.

        Raises:
            MasterLostError: there was no answer within `seconds`, or the connection is broken.
        """

    @abstractmethod
    def silent_for(self) -> float:
        """Seconds since the master last answered; infinite when the connection is broken."""

    @abstractmethod
    def close(self) -> None:
        """End its threads and connections, within seconds."""


class MasterConnection(ControlConnection):
    """The master's end: the table itself, the ranks' store, and with several nodes the port they connect to."""

    def __init__(self, node: Node, network: Network, log: Callable[[str], None]) -> None:
        """Raises UserInputError when the port is taken."""
        self.table = Table()
        listener = listen(network.bind, node.master_port) if node.nnodes > 1 else None
        self._server: MasterServer | None = None
        self._store: TCPStore | None = None
        self.renew_store()
        self.port = self.store_port
        if listener is not None:
            self.port = listener.getsockname()[1]
            self._server = MasterServer(listener, self.table, network.key, self.store_port, log)

    def renew_store(self) -> None:
        """An empty store for the ranks, on another port."""
        from torch._C._distributed_c10d import TCPStore

        inner = listen("127.0.0.1", 0)
        self.store_port = inner.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", self.store_port, None, True, timedelta(seconds=10), wait_for_workers=False,
            master_listen_fd=inner.detach(),
        )  # fmt: skip
        if self._server is not None:
            self._server.ranks_port = self.store_port

    def call(self, action: Callable[[KeyValue], T], seconds: float, idle: Callable[[], None]) -> T:
        return action(self.table)

    def silent_for(self) -> float:
        return 0.0

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._store = None  # its destructor ends and joins torch's own thread


class NodeConnection(ControlConnection):
    """The end of any other node. Every exchange happens in one thread, so that a network failure blocks that thread and
    not the launcher."""

    def __init__(self, connection: socket.socket, master: str, key: bytes) -> None:
        address, self.port = connection.getpeername()[:2]
        self.master = master
        self.contact = time.monotonic()  # when the master last answered
        self._connection = connection
        self._broken: Exception | None = None
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._busy = False
        self._tunnel = Tunnel(address, self.port, key)
        self.store_port = self._tunnel.port
        self._thread = threading.Thread(target=self._work, name="shardtune-link", daemon=True)
        self._thread.start()

    @classmethod
    def join(
        cls, node: Node, network: Network, seconds: float, log: Callable[[str], None], idle: Callable[[], None]
    ) -> NodeConnection:
        """Raises UserInputError when no master of this run answers within `seconds`."""
        connection = connect_to_master(node.master_addr, node.master_port, network.key, seconds, log, idle)
        return cls(connection, node.master_addr, network.key)

    def call(self, action: Callable[[KeyValue], T], seconds: float, idle: Callable[[], None]) -> T:
        box: list[T] = []
        done = threading.Event()

        def job() -> None:
            box.append(action(_Remote(self._connection)))
            done.set()

        self._jobs.put(job)
        deadline = time.monotonic() + seconds
        while not done.wait(0.05):
            idle()
            if self._broken is not None or time.monotonic() > deadline:
                raise self.lost_error()
        return box[0]

    def post(self, action: Callable[[KeyValue], Any]) -> None:
        """Do it soon; skipped while the previous one is still running."""
        if self._busy or self._broken is not None:
            return
        self._busy = True

        def job() -> None:
            action(_Remote(self._connection))
            self._busy = False

        self._jobs.put(job)

    def silent_for(self) -> float:
        return float("inf") if self._broken is not None else time.monotonic() - self.contact

    def lost_error(self) -> MasterLostError:
        how = (
            f"The connection broke: {self._broken}."
            if self._broken is not None
            else f"It has not answered for {time.monotonic() - self.contact:.0f} s."
        )
        return MasterLostError(
            f"Lost the connection to the master (node 0, {self.master}:{self.port}).",
            why=how,
            fix="Check the log of node 0 for why it ended. If it is still running, check the network between the two.",
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread where it waits for an answer
        self._jobs.put(None)
        self._thread.join(_JOIN)
        self._connection.close()
        self._tunnel.close()

    def _work(self) -> None:
        while self._broken is None and (job := self._jobs.get()) is not None:
            try:
                job()
            except (OSError, ValueError) as error:  # the connection, or what came over it
                self._broken = error
            self.contact = time.monotonic()


class _Remote:
    """The master's table over a connection. Has no timeout of its own: the launcher has one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def set(self, key: str, value: str) -> None:
        self._ask(op="set", key=key, value=value)

    def get(self, key: str) -> str | None:
        return self._ask(op="get", key=key)

    def add(self, key: str, value: str) -> str:
        there = self._ask(op="add", key=key, value=value)
        assert there is not None
        return there

    def _ask(self, **request: str) -> str | None:
        self._connection.sendall(frame(request))
        size = int.from_bytes(self._read(4), "big")
        if size > LARGEST_FRAME:
            raise ValueError(f"the master's reply has {size} bytes")
        value: str | None = json.loads(self._read(size))["value"]
        return value

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self._connection.recv(size - len(data))
            if not more:
                raise ConnectionError("the master closed it")
            data += more
        return bytes(data)
