"""How much is `96Gi`? Kubernetes' quantities, and what people write instead of them."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20),
    "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([A-Za-z]*))")


def parse_quantity(text: str) -> Decimal:
    """The number that a Kubernetes quantity stands for: `96Gi` → 103079215104, `500m` → 0.5.

    Raises:
        ValueError: it is none (`96GB`).
    """
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or (found[3] or "") not in _SUFFIXES:
        raise ValueError(f"'{text}' is not a Kubernetes quantity")
    return Decimal(found[1]) * (Decimal(f"1{found[2]}") if found[2] else _SUFFIXES[found[3] or ""])


def has_unit(text: str) -> bool:
    """Whether a memory size says its unit: `3846` does not, and means bytes."""
    found = _QUANTITY.fullmatch(text.strip())
    return found is not None and bool(found[2] or found[3])


def mebibytes(number: float) -> str:
    """Bytes as a quantity, rounded up: 1.5e9 → `1431Mi`, whole gibibytes as `2Gi`."""
    rounded = -int(-number // 2**20)
    return f"{rounded // 1024}Gi" if rounded % 1024 == 0 else f"{rounded}Mi"
