"""`auto` keeps an FP8 checkpoint in float8 only where its full values would not fit."""

from __future__ import annotations

import pytest

from shardtune.plan.precision import base_precision

MISTRAL4 = {"parameters": 118_972_826_624, "quantised": 117_000_000_000, "value_bytes": 2}
H200 = 141_000_000_000


def test_a_checkpoint_that_is_not_quantised_is_never_quantised_unasked() -> None:
    choice, why = base_precision(quantised=0, parameters=10**12, value_bytes=2, ranks=1, memory=10**9)
    assert choice == "bf16"
    assert "not quantised" in why


@pytest.mark.parametrize(("ranks", "expected"), [(1, "fp8"), (2, "fp8"), (3, "bf16"), (8, "bf16")])
def test_mistral_small_4_on_so_many_h200(ranks: int, expected: str) -> None:
    choice, why = base_precision(**MISTRAL4, ranks=ranks, memory=H200)
    assert choice == expected
    assert f"{118_972_826_624 * 2 / ranks / 2**30:.1f} GiB per rank dequantised" in why
    assert "of 131.3 GiB" in why


def test_what_float8_would_hold_counts_what_stays_in_full() -> None:
    _, why = base_precision(quantised=6, parameters=10, value_bytes=2, ranks=1, memory=10)
    assert "0.0 GiB in float8" in why
    _, why = base_precision(quantised=6 << 30, parameters=10 << 30, value_bytes=2, ranks=1, memory=10 << 30)
    assert "20.0 GiB per rank dequantised, 14.0 GiB in float8" in why
