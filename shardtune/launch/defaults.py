"""Which environment is safe for the libraries, and what does a start say? Before any of them is imported."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from datetime import datetime

_SAFE = {
    "TOKENIZERS_PARALLELISM": "false",  # its threads and the data loaders' forks do not go together
    "RDMAV_FORK_SAFE": "1",  # verbs memory survives the forks of data loaders
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a connection that closes at the end is no news
    "TORCH_FR_BUFFER_SIZE": "2000",  # the flight recorder: the last collectives of a rank, for a crash
}
_INSECURE = (
    "warning: insecure network: anyone who can connect to the master's port can join this run or stop it "
    "(SHARDTUNE_SECRET is not set; docs/security.md)"
)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # today's name and yesterday's; only one may be set


def set_safe_defaults(environ: MutableMapping[str, str]) -> None:
    """What the user has set stays."""
    for name, value in _SAFE.items():
        environ.setdefault(name, value)
    if not any(name in environ for name in _ALLOCATOR):
        environ[_ALLOCATOR[0]] = "expandable_segments:True"


def banner(nnodes: int, node_rank: int, nproc: int, master: str, gpus: list[str], insecure: bool = False) -> str:
    """One line per node: when, where, which node, whom it meets, what it computes on; another for an open network."""
    kinds = {name: gpus.count(name) for name in gpus}
    computes = ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "no GPU"
    where = f"node {node_rank} of {nnodes}, master {master}, " if nnodes > 1 else ""
    processes = f"{nproc} process{'es' if nproc > 1 else ''}"
    line = f"{datetime.now():%Y-%m-%d %H:%M:%S}  {socket.gethostname()}  {where}{processes}, {computes}"
    return f"{line}\n{_INSECURE}" if insecure else line
