"""Which environment variables does a run set, and why? What the user has set stays."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

from shardtune.errors import UserInputError

# Name: value and reason. Set before any library is imported. docs/nccl.md says what is left alone, and why.
SAFE_DEFAULTS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "TOKENIZERS_PARALLELISM": ("false", "its threads and the data loaders' forks are incompatible"),
    "RDMAV_FORK_SAFE": ("1", "memory registered with RDMA cards survives the forks of data loaders"),
    "TORCH_CPP_LOG_LEVEL": ("ERROR", "closed connections at the end of a run are expected"),
    "TORCH_FR_BUFFER_SIZE": ("2000", "the flight recorder keeps the last collectives of a rank for crash/"),
})  # fmt: skip
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the current and the old name; only one may be set
_EXPANDABLE = ("expandable_segments:True", "memory that was freed in other sizes can be used again")
# Not for an evaluation, whose standard output programs read: NCCL writes there.
SEVERAL_NODES: Mapping[str, tuple[str, str]] = MappingProxyType({
    "NCCL_DEBUG": ("WARN", "if NCCL fails, it names the call and the device; otherwise it prints its version only"),
})  # fmt: skip


def set_safe_defaults(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set what is not set yet; returns the reason of each variable that was.

    Raises:
        UserInputError: one that is set would break a library later.
    """
    _check_threads(environ)
    defaults = dict(SAFE_DEFAULTS)
    if not any(name in environ for name in _ALLOCATOR):
        defaults[_ALLOCATOR[0]] = _EXPANDABLE
    return _set(environ, defaults)


def _check_threads(environ: MutableMapping[str, str]) -> None:
    """accelerate takes the number as it is, once the run has begun; an empty one, as templates leave it, is unset."""
    threads = environ.get("OMP_NUM_THREADS")
    if threads == "":
        del environ["OMP_NUM_THREADS"]
    elif threads is not None and not re.fullmatch(r"\s*[+-]?\d+\s*", threads):
        raise UserInputError(
            f"OMP_NUM_THREADS is '{threads}', which is not a whole number.",
            fix="Set it to the threads of each process, or unset it: then every process gets its share of the cores.",
        )


def set_defaults_of_nodes(environ: MutableMapping[str, str]) -> dict[str, str]:
    """The same for what only a run of several nodes needs."""
    return _set(environ, SEVERAL_NODES)


def _set(environ: MutableMapping[str, str], defaults: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    reasons = {}
    for name, (value, reason) in defaults.items():
        if name not in environ:
            environ[name], reasons[name] = value, reason
    return reasons
