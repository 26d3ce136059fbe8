"""Who may join the nodes of a run? Those that prove a shared secret; without one, only what is on this machine."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardtune.errors import UserInputError
from shardtune.launch.process_role import Node

SECRET_VARIABLE = "SHARDTUNE_SECRET"
INSECURE_VARIABLE = "SHARDTUNE_INSECURE_NETWORK"
_SHORTEST = 16  # characters
_ROUNDS = 200_000  # a guess costs whoever recorded a handshake a tenth of a second


@dataclass(frozen=True)
class Network:
    """How the nodes of a run trust each other. `key` is derived from the secret and never leaves this process."""

    key: bytes = field(repr=False)
    bind: str  # the address the master listens on; empty for all of them
    insecure: bool = False


def read_network(environ: Mapping[str, str], node: Node) -> Network:
    """What the environment says about trust between nodes.

    Raises:
        UserInputError: the master is on a network and there is no secret, or one that is too short.
    """
    if node.nnodes == 1:
        return Network(b"", "127.0.0.1")
    secret = environ.get(SECRET_VARIABLE, "").strip()  # a file's last line end is not part of it
    bind = _loopback(node.master_addr)
    if secret:
        if len(secret) < _SHORTEST:
            raise UserInputError(
                f"{SECRET_VARIABLE} has {len(secret)} characters; at least {_SHORTEST} are needed.",
                why="Anyone who guesses it can join the run or stop it.",
                fix="Set it to the same long value on all nodes, for example from `openssl rand -hex 32`.",
            )
        return Network(_derive(secret), bind)
    if bind:
        return Network(_derive(""), bind)
    if environ.get(INSECURE_VARIABLE, "").lower() not in ("", "0", "false", "no"):
        return Network(_derive(""), bind, insecure=True)
    raise UserInputError(
        f"{SECRET_VARIABLE} is not set, and the master {node.master_addr} is reached over a network.",
        why=f"Anyone who can connect to port {node.master_port} of node 0 could join this run or stop it.",
        fix=f"Set {SECRET_VARIABLE} to the same value on all nodes (for example from `openssl rand -hex 32`), or pass "
        f"--insecure-network (or {INSECURE_VARIABLE}=1) if everyone on this network is trusted. See docs/security.md.",
    )


def _loopback(address: str) -> str:
    """The address itself where only this machine can reach it, else empty.

    Names are not resolved: many systems map their own host name to 127.0.1.1, and other nodes do not.
    """
    if address == "localhost":
        return "127.0.0.1"
    try:
        return address if ipaddress.ip_address(address).is_loopback else ""
    except ValueError:
        return ""


def _derive(secret: str) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"shardtune launcher", _ROUNDS)
