"""Output on the pages that no command here repeats: it has the form in which the code prints it today."""

from __future__ import annotations

import re

from running import REPOSITORY

from shardtune.report.evaluations import with_interval

_CELL = re.compile(r"(?P<value>[+−]?[\d,.]+)(?P<unit> %| pp)? \[(?P<low>[+−]?[\d,.]+), (?P<high>[+−]?[\d,.]+)\]")


def test_the_table_of_an_evaluation_is_written_as_eval_writes_it() -> None:
    page = (REPOSITORY / "docs" / "evaluate.md").read_text(encoding="utf-8")
    cells = list(_CELL.finditer(page.partition("tuned − base\n")[2].partition("```")[0]))
    assert len(cells) > 15
    for cell in cells:
        share = cell["unit"] is not None
        numbers = {
            name: float(cell[name].replace("−", "-").replace(",", "")) / (100 if share else 1)
            for name in ("value", "low", "high")
        }
        signed = cell["value"][0] in "+−"
        assert with_interval(numbers, "share" if share else "number", " ", signed=signed) == cell[0]
