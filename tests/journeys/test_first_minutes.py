"""The quickstart, and what it says to type next."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request

import pytest
from journey import Journey


@pytest.mark.slow
def test_what_the_quickstart_names_at_its_end_works_as_it_is_typed(journey: Journey) -> None:
    done = journey.shardtune("quickstart", "--tiny", "--nproc", 1)
    named = {line[:10].rstrip(): line[10:] for line in done.stdout.splitlines()[-5:]}
    assert list(named) == ["report", "live", "chat", "evaluate", "export"]
    for label in ("evaluate", "report", "chat", "export"):  # without input, a chat ends at once
        journey.command(*shlex.split(named[label]))
    run = journey.folder / shlex.split(named["report"])[-1]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "exact match" in page and "own-validation-final" in page
    assert (run / "export" / "merged" / "model.safetensors").is_file()
    assert named["live"] == "shardtune dashboard runs/quickstart"
    for typed, name in ((named["live"], run.name), ("shardtune dashboard", f"quickstart/{run.name}")):
        assert [(row["name"], row["status"]) for row in _listed(journey, typed)] == [(name, "done")]


def _listed(journey: Journey, typed: str) -> list[dict]:
    """The runs that a dashboard lists, and opens; it ends with the test."""
    words = [*shlex.split(typed), "--port", "0"]
    with subprocess.Popen(
        words, cwd=journey.folder, env=journey.environment, stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            assert served.stdout is not None
            address = served.stdout.readline().split()[-1]
            rows = _get(f"{address}api/runs")["runs"]
            for row in rows:
                assert _get(f"{address}api/runs/{row['name']}")["title"] == row["name"].split("/")[-1]
            return rows
        finally:
            served.terminate()


def _get(address: str) -> dict:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)
