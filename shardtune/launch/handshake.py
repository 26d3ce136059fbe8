"""Is the other end of a connection a launcher of this run? Both ends prove the shared secret; it is never sent.

    node    → master   head, role, 32 random bytes
    master  → node     head, 32 random bytes, proof(master)
    node    → master   proof(node)
    master  → node     ACCEPTED

A proof is an HMAC over who proves it, the role and both random values, so that a recorded one is worth nothing in any
other connection. Every message has a fixed size: nothing is allocated at a stranger's wish.
"""

from __future__ import annotations

import hmac
import secrets

from shardtune.errors import UserInputError
from shardtune.launch.network import SECRET_VARIABLE

KEY_VALUE, TUNNEL = b"K", b"T"  # the roles: a launcher's own connection, or one of its ranks'
ACCEPTED = b"+"
SECONDS = 5.0  # for the whole of it
_NAME = b"shardtune launcher "
_HEAD = _NAME + b"01\n"
_NONCE = PROOF_SIZE = 32
HELLO_SIZE = len(_HEAD) + 1 + _NONCE
REPLY_SIZE = len(_HEAD) + _NONCE + PROOF_SIZE


class NotAMasterError(Exception):
    """What listens there is not the master of a run. The master may still start later."""


class UnauthenticatedError(Exception):
    """A connection that is not from a launcher of this run. `reply` is all that is sent back."""

    def __init__(self, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply


def hello(role: bytes) -> bytes:
    """The node's first message."""
    return _HEAD + role + secrets.token_bytes(_NONCE)


def answer(key: bytes, hello_bytes: bytes) -> tuple[bytes, bytes]:
    """The master's reply to a hello, and the proof it then expects.

    Raises:
        UnauthenticatedError: this is not a hello.
    """
    if hello_bytes.startswith(_NAME) and not hello_bytes.startswith(_HEAD):
        raise UnauthenticatedError("it runs another version of shardtune", reply=_HEAD)
    if not hello_bytes.startswith(_HEAD) or role_of(hello_bytes) not in (KEY_VALUE, TUNNEL):
        raise UnauthenticatedError("it does not speak shardtune's protocol")
    nonce = secrets.token_bytes(_NONCE)
    return _HEAD + nonce + _proof(key, b"master", hello_bytes, nonce), _proof(key, b"node", hello_bytes, nonce)


def role_of(hello_bytes: bytes) -> bytes:
    return hello_bytes[len(_HEAD) : len(_HEAD) + 1]


def check_reply(key: bytes, hello_bytes: bytes, reply: bytes, where: str) -> bytes:
    """The node's proof, once the master has given its own. `reply` may be short: what came before the end.

    Raises:
        NotAMasterError: these are not the bytes of a master.
        UserInputError: it is one, but of another run or version.
    """
    if not reply:
        raise NotAMasterError("it closes the connection immediately")
    if not _HEAD.startswith(reply[: len(_HEAD)]):
        if reply.startswith(_NAME):
            raise UserInputError(
                f"The master {where} runs another version of shardtune.",
                why="Its launcher protocol is not compatible with this node's.",
                fix="Use the same image on all nodes.",
            )
        raise NotAMasterError(f"it replied with {reply[:20]!r}")
    if len(reply) < REPLY_SIZE:
        raise NotAMasterError("it stopped during the handshake")
    nonce, proof = reply[len(_HEAD) : -PROOF_SIZE], reply[-PROOF_SIZE:]
    if not hmac.compare_digest(proof, _proof(key, b"master", hello_bytes, nonce)):
        raise UserInputError(
            f"{SECRET_VARIABLE} on this node differs from that of the master {where}.",
            why="All nodes of a run must have the same secret.",
            fix=f"Set {SECRET_VARIABLE} to the same value on all nodes (on none with --insecure-network), and check "
            "that this is the master of this run.",
        )
    return _proof(key, b"node", hello_bytes, nonce)


def check_proof(expected: bytes, proof: bytes) -> None:
    """Raises UnauthenticatedError if the node does not know the secret."""
    if not hmac.compare_digest(expected, proof):
        raise UnauthenticatedError(f"it does not know the shared secret (check {SECRET_VARIABLE} there)")


def _proof(key: bytes, who: bytes, hello_bytes: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, who + hello_bytes + nonce, "sha256")
