"""How did a rank fail? It writes a record for its launcher, which prints the first cause, once."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

from shardtune.errors import MachineError, ShardtuneError, UserInputError
from shardtune.run.channel import Channel, put_message, read_message
from shardtune.run.error_codes import PEER_LOST_MESSAGES, code_of_message
from shardtune.run.exit_codes import FAILED
from shardtune.terminal import fitted

_writing = threading.Lock()  # a rank's main thread and its watchdog may fail in the same moment


def report_failure(error: BaseException, rank: int, doing: str = "") -> int:
    """Report the error to the launcher (or, without one, to the terminal); returns the exit code of this process.

    A ShardtuneError is printed in its three parts; anything else is a bug or a broken machine and keeps its traceback.
    """
    kind = kind_of(error)
    if isinstance(error, ShardtuneError):
        code, explained, text = error.exit_code, error.code, render(error)
    else:
        code, explained = FAILED, code_of_message(str(error))
        text = "".join(traceback.format_exception(error))
        text += more_about(explained) if explained and kind == "error" else ""
    if not record_failure(rank, kind, text, code, doing, explained):
        message = text if isinstance(error, ShardtuneError) and rank == 0 else f"rank {rank}: {text}"
        print(fitted(message, sys.stderr), file=sys.stderr)
    return code


def kind_of(error: BaseException) -> str:
    """`user_error`, `machine_error`, `known_error` (any other ShardtuneError), `peer_lost` (follows from another
    rank's end), or `error`."""
    if isinstance(error, UserInputError):
        return "user_error"
    if isinstance(error, MachineError):
        return "machine_error"
    if isinstance(error, ShardtuneError):
        return "known_error"
    message = str(error).lower()
    # An OSError of our own (a file, a hub) may say "connection refused" too; the libraries raise RuntimeErrors.
    peer_lost = isinstance(error, RuntimeError) and any(text in message for text in PEER_LOST_MESSAGES)
    return "peer_lost" if peer_lost else "error"


def record_failure(rank: int, kind: str, text: str, exit_code: int, doing: str = "", error_code: str = "") -> bool:
    """Write this rank's failure where its launcher reads it; False when there is no launcher.

    The first record stays: later failures of the same rank follow from it.
    """
    channel = Channel.inherited(os.environ)
    if channel is None:
        return False
    record = {
        "rank": rank, "time": time.time(), "kind": kind, "text": text, "exit_code": exit_code, "doing": doing,
        "error_code": error_code,
    }  # fmt: skip
    with _writing:
        try:
            if read_message(channel.failure) is None:
                put_message(channel.failure, record)
        except OSError:  # out of memory, which may well be the failure itself
            return False
    return True


def render(error: ShardtuneError) -> str:
    """The three parts, each with its label."""
    return three_parts(error.what, error.why, error.fix, error.code)


def three_parts(what: str, why: str = "", fix: str = "", code: str = "") -> str:
    parts = [f"error: {what}"]
    parts += [f"  why: {why}"] if why else []
    parts += [f"  fix: {fix}"] if fix else []
    parts += [more_about(code)] if code else []
    return "\n".join(parts)


def more_about(code: str) -> str:
    """The line that ends a message whose code `shardtune explain` knows."""
    return f"  more: shardtune explain {code}"
