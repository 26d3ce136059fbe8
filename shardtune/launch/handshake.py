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
    """What listens there does not answer as the master of a run does. It may be too early: the master may come yet."""


class StrangerError(Exception):
    """A connection that is not from a launcher of this run. `reply` is all it may be told."""

    def __init__(self, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply


def hello(role: bytes) -> bytes:
    """The node's first message."""
    return _HEAD + role + secrets.token_bytes(_NONCE)


def answer(key: bytes, said: bytes) -> tuple[bytes, bytes]:
    """The master's reply to a hello, and the proof it then expects.

    Raises:
        StrangerError: this is no hello.
    """
    if said.startswith(_NAME) and not said.startswith(_HEAD):
        raise StrangerError("it is another version of shardtune", reply=_HEAD)
    if not said.startswith(_HEAD) or role_of(said) not in (KEY_VALUE, TUNNEL):
        raise StrangerError("it does not speak shardtune's protocol")
    nonce = secrets.token_bytes(_NONCE)
    return _HEAD + nonce + _proof(key, b"master", said, nonce), _proof(key, b"node", said, nonce)


def role_of(said: bytes) -> bytes:
    return said[len(_HEAD) : len(_HEAD) + 1]


def check_reply(key: bytes, said: bytes, reply: bytes, where: str) -> bytes:
    """The node's proof, once the master has given its own. `reply` may be short: what came before the end.

    Raises:
        NotAMasterError: these are not the bytes of a master.
        UserInputError: it is one, but of another run or version.
    """
    if not reply:
        raise NotAMasterError("it closes the connection at once")
    if not _HEAD.startswith(reply[: len(_HEAD)]):
        if reply.startswith(_NAME):
            raise UserInputError(
                f"The master {where} runs another version of shardtune.",
                why="The two speak different versions of the launchers' protocol.",
                fix="Use one image on all nodes.",
            )
        raise NotAMasterError(f"it sends other bytes ({reply[:20]!r})")
    if len(reply) < REPLY_SIZE:
        raise NotAMasterError("it stopped in the middle of the handshake")
    nonce, proof = reply[len(_HEAD) : -PROOF_SIZE], reply[-PROOF_SIZE:]
    if not hmac.compare_digest(proof, _proof(key, b"master", said, nonce)):
        raise UserInputError(
            f"The master {where} has another {SECRET_VARIABLE} than this node.",
            why="Nodes of one run prove to each other that they know the same secret.",
            fix=f"Set {SECRET_VARIABLE} to the same value on all nodes (on none with --insecure-network), and check "
            "that this is the master of this run.",
        )
    return _proof(key, b"node", said, nonce)


def check_proof(expected: bytes, proof: bytes) -> None:
    """Raises StrangerError where the node does not know the secret."""
    if not hmac.compare_digest(expected, proof):
        raise StrangerError(f"it does not know the shared secret (check {SECRET_VARIABLE} there)")


def _proof(key: bytes, who: bytes, said: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, who + said + nonce, "sha256")
