"""How do the launchers of several nodes talk? Through a key-value store on the master, with a bound on every wait."""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shardtune.errors import ShardtuneError, UserInputError
from shardtune.launch.exit_codes import LOST

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_ANSWER = timedelta(seconds=10)  # of the store, where it has a limit of its own
_BACKLOG = 4096  # thousands of ranks may connect in the same second


class MasterLostError(ShardtuneError):
    """The master's store does not answer any more."""

    exit_code = LOST


class Link:
    """A store whose every call happens in one thread, so that a cut network stops that thread and not the launcher."""

    def __init__(self, store: Store, master: str, port: int) -> None:
        self.store, self.master, self.port = store, master, port
        self.contact = time.monotonic()  # when the store last answered
        self._broken: Exception | None = None
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._busy = False
        threading.Thread(target=self._work, name="shardtune-link", daemon=True).start()

    @classmethod
    def host(cls, port: int, *, everywhere: bool) -> Link:
        """The master's end. `everywhere` False: nobody outside this machine can connect.

        Raises:
            UserInputError: the port is taken.
        """
        from torch._C._distributed_c10d import TCPStore

        listener = _listen(port, everywhere)
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1", port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(store, "127.0.0.1", port)

    @classmethod
    def connect(cls, master: str, port: int) -> Link:
        """A node's end; the master is known to listen. Raises torch's DistNetworkError when it has just gone."""
        from torch._C._distributed_c10d import TCPStore

        return cls(TCPStore(master, port, None, False, _ANSWER), master, port)

    def call(self, action: Callable[[Store], T], seconds: float) -> T:
        """The answer of the store.

        Raises:
            MasterLostError: there was none within `seconds`, or the connection is broken.
        """
        box: list[T] = []
        done = threading.Event()

        def job() -> None:
            box.append(action(self.store))
            done.set()

        self._jobs.put(job)
        deadline = time.monotonic() + seconds
        while not done.wait(0.05):
            if self._broken is not None or time.monotonic() > deadline:
                raise self.lost()
        return box[0]

    def post(self, action: Callable[[Store], Any]) -> None:
        """Do it soon; left out while the one before is still under way."""
        if self._busy or self._broken is not None:
            return
        self._busy = True

        def job() -> None:
            action(self.store)
            self._busy = False

        self._jobs.put(job)

    def silent_for(self) -> float:
        """Seconds since the store last answered; endless when the connection is broken."""
        return float("inf") if self._broken is not None else time.monotonic() - self.contact

    def lost(self) -> MasterLostError:
        how = (
            f"The connection broke: {str(self._broken).splitlines()[0]}"
            if self._broken is not None
            else f"It has not answered for {time.monotonic() - self.contact:.0f} s."
        )
        return MasterLostError(
            f"This node has lost the master (node 0, {self.master}:{self.port}).",
            why=how,
            fix="Look at node 0: its own message says what ended it. If it runs, look at the network between the two.",
        )

    def _work(self) -> None:
        from torch.distributed import DistError

        while self._broken is None:
            job = self._jobs.get()
            try:
                job()
            except DistError as error:
                self._broken = error
            self.contact = time.monotonic()


def _listen(port: int, everywhere: bool) -> socket.socket:
    try:
        if everywhere and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        return socket.create_server(("" if everywhere else "127.0.0.1", port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise UserInputError(
            f"The master cannot listen on port {port} of {socket.gethostname()}.",
            why="Another program (an earlier run?) listens there."
            if error.errno == errno.EADDRINUSE
            else "This user may not use that port.",
            fix="Choose another --master-port, the same on all nodes.",
        ) from None


def wait_for_master(
    master: str, port: int, seconds: float, say: Callable[[str], None], idle: Callable[[], None]
) -> None:
    """Return when something listens there; pods start at different times, so a refusal is not an answer yet.

    Args:
        idle: Called while waiting; may raise (a signal came).

    Raises:
        UserInputError: nothing did within `seconds`; says what was tried last.
    """
    began, told = time.monotonic(), 0.0
    while True:
        idle()
        try:
            socket.create_connection((master, port), timeout=min(5.0, seconds)).close()
            return
        except OSError as error:
            problem = _problem(error, master, port)
        waited = time.monotonic() - began
        if waited >= seconds:
            raise UserInputError(
                f"The master {master}:{port} was not reached within {waited:.0f} s.",
                why=problem,
                fix="Check --master-addr and --master-port, that node 0 is started, and that no firewall is between. "
                "parallel.join_timeout_minutes is how long a node waits.",
            )
        if waited - told >= (3 if told == 0 else 30):
            told = waited
            say(f"waiting for the master {master}:{port} since {waited:.0f} s: {problem}")
        time.sleep(min(0.5, seconds / 10))


def _problem(error: OSError, master: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return f"The name '{master}' does not resolve to an address ({error.strerror})."
    if isinstance(error, ConnectionRefusedError):
        return f"The machine answers, but nothing listens on port {port} (connection refused)."
    if isinstance(error, TimeoutError):
        return "No answer at all (timed out): a wrong address, a machine that is off, or a firewall."
    return f"{error.strerror or error}."
