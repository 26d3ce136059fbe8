"""How much of the fine-tuning is left when weights are rounded? Measured per parameter, while they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_DOUBLE = torch.float64


@dataclass
class Survival:
    """Sums over the elements of one parameter, or of several.

    With `delta` = what the adapter adds to the base's value, and `moved` = what is written − the base's value, both
    exact: `kept` = Σ moved · delta, `delta` = Σ delta², `lost` = Σ (moved − delta)².
    """

    kept: float = 0.0
    delta: float = 0.0
    lost: float = 0.0

    def add(self, old: Tensor, new: Tensor, written: Tensor) -> None:
        """All float32: the base's values, those with the adapter, and these as they were rounded."""
        delta, moved = new - old, written - old
        self.kept += (moved * delta).sum(dtype=_DOUBLE).item()
        self.delta += delta.square().sum(dtype=_DOUBLE).item()
        self.lost += moved.sub_(delta).square_().sum(dtype=_DOUBLE).item()

    @property
    def share(self) -> float:
        """What is left of the change: its projection, `kept / delta`. 1 where there is no change."""
        return self.kept / self.delta if self.delta else 1.0

    @property
    def noise(self) -> float:
        """The size of the rounding errors relative to that of the change."""
        return math.sqrt(self.lost / self.delta) if self.delta else 0.0


def together(parts: Mapping[str, Survival]) -> Survival:
    return Survival(
        sum(part.kept for part in parts.values()),
        sum(part.delta for part in parts.values()),
        sum(part.lost for part in parts.values()),
    )


def by_share(parts: Mapping[str, Survival]) -> list[tuple[str, Survival]]:
    """The changed parameters, the one that keeps the least first."""
    return sorted(((name, part) for name, part in parts.items() if part.delta), key=lambda item: item[1].share)
