"""An evaluation's numbers fit a terminal, whole words and all: as a table, or line by line in a narrow one."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from shardtune.evaluation.intervals import Estimate
from shardtune.evaluation.metrics import Metric
from shardtune.evaluation.result import Evaluation
from shardtune.evaluation.table import print_evaluation


@pytest.mark.parametrize("width", [80, 60, 40])
def test_the_widest_numbers_fit_also_a_narrow_terminal(width: int) -> None:
    numbers = {
        "loss": (Estimate(3.4901, 3.3568, 3.6199), Estimate(0.0551, 0.0384, 0.0734), Estimate(-0.435, -0.5653, 0.3037)),
        "perplexity": (Estimate(73.82, 72.56, 75.18), Estimate(64.46, 63.5, 65.6), Estimate(-9.3581, -11.0827, 7.6275)),
        "huge": (Estimate(999.0, 998.0, 999.5), Estimate(9999.0, 9998.0, 9999.5), Estimate(-999.0, -999.5, 998.0)),
    }
    metrics = [
        Metric(name, name, "number", "lower", 9, {"base": base, "tuned": tuned}, difference)
        for name, (base, tuned, difference) in numbers.items()
    ]
    sides = {"base": Estimate(0.0, 0.0, 1.0), "tuned": Estimate(1.0, 0.0, 1.0)}
    metrics.append(
        Metric("json_precision", "field precision", "share", "higher", 9, sides, Estimate(1.0, -1.0, 1.0))  # type: ignore[arg-type]
    )
    about = {"sides": ["base", "tuned"], "data": {"rows": 9, "supervised_tokens": 99}, "generation": None}
    out = StringIO()
    print_evaluation(Console(width=width, file=out), Evaluation(about, tuple(metrics), (), {}, (), ()))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= max(width, 46)  # a number stays on one line with its interval
    assert "…" not in out.getvalue() and "loss" in out.getvalue()
    assert sum("unclear" in line for line in lines) == 4, out.getvalue()
    for shown in ("[−0.5653, +0.3037]", "[−11.08, +7.63]", "[−999.50, +998.00]", "[−100.0, +100.0]", "precision"):
        assert shown in out.getvalue(), out.getvalue()
