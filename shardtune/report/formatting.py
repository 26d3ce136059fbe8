"""How are numbers and texts formatted? The same everywhere in reports: 1.2k, 3:58, 12.3 GiB."""

from __future__ import annotations

import math
import unicodedata
from datetime import datetime

from shardtune.terminal import clock, count, operations, percent
from shardtune.terminal import duration as seconds
from shardtune.terminal import size as memory

__all__ = [
    "age",
    "clock",
    "count",
    "loss",
    "memory",
    "operations",
    "percent",
    "plain",
    "seconds",
    "short",
    "value",
    "when",
]


def short(value: float) -> str:
    """1234 → `1.23k`, 45 → `45`, 3214554 → `3.21M`."""
    if not math.isfinite(value):
        return str(value)
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}P"


def loss(value: float) -> str:
    if not math.isfinite(value):
        return {"nan": "NaN", "inf": "∞"}.get(str(value), "−∞")
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def value(given: float) -> str:
    """Any number of a script: `0.3127`, `12.3k`, `1e-05`."""
    return (
        short(given)
        if math.isfinite(given) and abs(given) >= 1e4
        else f"{given:.4g}"
        if math.isfinite(given)
        else loss(given)
    )


def age(value: float) -> str:
    """How long ago, roughly: `35 s`, `12 min`, `5 h`, `3 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if value >= length:
            return f"{value / length:.0f} {unit}"
    return f"{max(0.0, value):.0f} s"


def when(time: float) -> str:
    """Local time on the machine that writes the report; empty if out of range."""
    try:
        return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return ""


def plain(value: object, most: int = 20_000) -> str:
    """Untrusted text, safe to show: no control or direction-changing characters, no surrogates, limited in length."""
    text = value if isinstance(value, str) else str(value)
    cut = f" … ({len(text) - most:,} more characters)" if len(text) > most else ""
    return "".join(_visible(char) for char in text[:most]) + cut


def _visible(char: str) -> str:
    if char in "\n\t" or char.isprintable():
        return char
    kind = unicodedata.category(char)
    return char if kind in ("Zs", "Zl", "Zp") else f"\\u{ord(char):04x}"
