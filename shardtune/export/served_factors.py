"""What is the low-rank change of each module as servers see it? Plain 2-D factors of one rank, experts one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardtune.adapters.weight_changes import LowRank
from shardtune.errors import ShardtuneError
from shardtune.export.served_models import Experts, joined_with

LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<module>.+)")
GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Factors:
    """One module's change: `b @ a`, with no scale beside it.

    Attributes:
        module: The text model's name of it; of an expert `….experts.3.gate_proj`, as the server names it.
        a, b: (rank, in) and (out, rank), in float32.
        parameter: Which parameter of the base it belongs to.
    """

    module: str
    a: Tensor
    b: Tensor
    parameter: str


def served_factors(
    changes: Mapping[str, LowRank], shapes: Mapping[str, tuple[int, ...]], experts: Experts | None
) -> Iterator[Factors]:
    """The factors of every module that is written, one at a time.

    The scale is multiplied into B; ranks are filled up to the largest with zeros, which adds nothing to the product.

    Args:
        changes: By the base parameter's name: those of linear modules (`….weight`) and of fused experts.
        shapes: Of the base's parameters.
    """
    rank = max_rank(changes)
    done: set[str] = set()
    for name, change in changes.items():
        if change.a.dim() == 3:
            block = name.rpartition(".")[0]
            if block not in done:
                done.add(block)
                assert experts is not None, "experts that a server does not take were refused"
                yield from _of_experts(block, changes, shapes, experts, rank)
            continue
        module = name.removesuffix(".weight")
        for member in joined_with(module):
            parameter = f"{member}.weight"
            if member in done or parameter not in shapes:
                continue
            done.add(member)
            own = changes.get(parameter)
            a, b = _padded(own, rank) if own is not None else _zeros(shapes[parameter], rank)
            yield Factors(member, a, b, parameter)


def max_rank(changes: Mapping[str, LowRank]) -> int:
    return max(change.a.shape[-2] for change in changes.values())


def relative_difference(change: LowRank, a: Tensor, b: Tensor) -> float:
    """|b a - delta| / |delta| in the Frobenius norm, in float64 and from the factors alone.

    The products themselves are as large as the base: |X Y|² = Σ (XᵀX)(Y Yᵀ), which takes rank² numbers.
    """
    left = torch.cat([b.double(), -change.b.double() * change.scale], dim=-1)
    right = torch.cat([a.double(), change.a.double()], dim=-2)
    norm = _norm(change.b.double() * change.scale, change.a.double())
    difference = _norm(left, right)
    return float(difference / norm) if norm else float(difference)


def _norm(b: Tensor, a: Tensor) -> Tensor:
    squares = ((b.transpose(-2, -1) @ b) * (a @ a.transpose(-2, -1))).sum()
    return squares.clamp(min=0).sqrt()


def _of_experts(
    block: str,
    changes: Mapping[str, LowRank],
    shapes: Mapping[str, tuple[int, ...]],
    experts: Experts,
    rank: int,
) -> Iterator[Factors]:
    """Gate, up and down of each expert: servers stack all three, so what did not train is there as zeros."""
    found = LAYER.fullmatch(block)
    if found is None:
        raise ShardtuneError(f"The experts '{block}' are in no decoder layer.", fix="Please report this.")
    served = f"model.layers.{found['layer']}.{experts.module}"
    fused, down = (changes.get(f"{block}.{name}") for name in (GATE_UP, DOWN))
    count, twice, hidden = shapes[f"{block}.{GATE_UP}"]  # (experts, gate above up, in): `prepare` has checked it
    width = twice // 2
    for expert in range(count):
        for name, change, rows, shape, parameter in (
            (experts.gate, fused, slice(0, width), (width, hidden), GATE_UP),
            (experts.up, fused, slice(width, twice), (width, hidden), GATE_UP),
            (experts.down, down, slice(None), (hidden, width), DOWN),
        ):
            if change is None:
                a, b = _zeros(shape, rank)
            else:
                a, b = _padded(LowRank(change.a[expert], change.b[expert, rows], change.scale), rank)
            yield Factors(f"{served}.{expert}.{name}", a, b, f"{block}.{parameter}")


def _padded(change: LowRank, rank: int) -> tuple[Tensor, Tensor]:
    missing = rank - change.a.shape[0]
    a = torch.nn.functional.pad(change.a.float(), (0, 0, 0, missing))
    b = torch.nn.functional.pad(change.b.float() * change.scale, (0, missing))
    return a.contiguous(), b.contiguous()


def _zeros(shape: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rank, shape[1]), torch.zeros(shape[0], rank)
