"""How is an adapter's product added to what its layer gave? In place, on a GPU by a kernel that reads and writes once.

For layers whose frozen product cannot add itself to what is there: those of float8 codes.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor


def add_low_rank_(target: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """`target + alpha * left @ right`, in the place of target: (n, m), (n, r), (r, m)."""
    pass_ = _pass() if target.is_cuda else None
    if pass_ is not None and pass_.takes(target, left.shape[1]):
        added: Tensor = pass_.add_low_rank_(target, left, right, alpha)
        return added
    return target.addmm_(left, right, alpha=alpha)


@cache
def _pass() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from shardtune.kernels import low_rank_pass

    return low_rank_pass
