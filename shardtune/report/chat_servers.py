"""Is a chat with a run's model being served on this machine, and where? Records that live as long as their server.

They lie in a folder of this user's own: what others could write there would become a link on the dashboard. A record
is a lease, which its server holds while it lives, and a file with its address, without a token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardtune.durable import read_plain, replace_file
from shardtune.lease import Lease, looks_alive


@dataclass(frozen=True)
class ChatServer:
    """Where a chat is served.

    Attributes:
        address: Without a token.
        needs_token: Only those who know it get in.
    """

    address: str
    needs_token: bool


def records_folder() -> Path:
    """`$XDG_RUNTIME_DIR/shardtune`, or `~/.cache/shardtune/chats`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "shardtune"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardtune" / "chats"


@contextmanager
def recorded(run: Path, server: ChatServer) -> Iterator[bool]:
    """In the block, the server can be found by its run.

    Yields:
        False: it cannot be written down (a read-only home), or another chat of the run is served already.
    """
    path = _record(run)
    lease = None
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(path.parent):
            lease = Lease.take(path.with_suffix(".lease"))
            if lease is not None:
                replace_file(path, json.dumps({"address": server.address, "needs_token": server.needs_token}))
    try:
        yield lease is not None
    finally:
        if lease is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            lease.release()


def chat_server(run: Path) -> ChatServer | None:
    """The one that serves a run's model now, if there is any on this machine."""
    path = _record(run)
    if not _is_private(path.parent) or not looks_alive(path.with_suffix(".lease")):
        return None
    try:
        found = json.loads(read_plain(path))
        address, needs_token = found["address"], found["needs_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(address, str) or not address.startswith("http://"):
        return None
    return ChatServer(address, bool(needs_token))


def _record(run: Path) -> Path:
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]
    return records_folder() / f"chat-{name}.json"


def _is_private(folder: Path) -> bool:
    """Ours, and writable for nobody else."""
    try:
        stat = folder.stat()
    except OSError:
        return False
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022
