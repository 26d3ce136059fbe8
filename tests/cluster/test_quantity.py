"""Kubernetes' quantities are read as the API server reads them."""

from __future__ import annotations

import pytest

from shardtune.cluster.quantity import has_unit, mebibytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("96Gi", 96 * 2**30),
        ("96G", 96 * 10**9),
        ("3846", 3846),
        ("1.5Gi", 3 * 2**29),
        ("2e3", 2000),
        ("1E", 10**18),
        (".5k", 500),
    ],
)
def test_quantities(text: str, number: int) -> None:
    assert parse_quantity(text) == number


def test_thousandths_of_a_core() -> None:
    assert float(parse_quantity("500m")) == 0.5


@pytest.mark.parametrize("text", ["96GB", "96 Gi", "96gi", "", "Gi", "96GiB", "1e3Gi"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        parse_quantity(text)


def test_units_and_sizes() -> None:
    assert [has_unit(text) for text in ("3846", "96Gi", "1e9", "96G")] == [False, True, True, True]
    assert [mebibytes(number) for number in (2**30, 1.5e9, 1)] == ["1Gi", "1431Mi", "1Mi"]
