"""Run on ranks by test_exchange.py: send values, and write down what this rank received."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardtune.config.schema import ParallelSection
from shardtune.errors import UserInputError
from shardtune.parallel.processes import join
from shardtune.train import context
from shardtune.train.context import refuse_different_data


def refusal(processes: Any, fingerprint: str) -> list[Any]:
    try:
        refuse_different_data(processes, fingerprint)
    except UserInputError as error:
        return [error.exit_code, error.what, error.why, error.fix]
    return []


def main(out: str) -> None:
    with join(ParallelSection(device="cpu")) as processes:
        rank = processes.rank
        mine = {"rank": rank, "text": "é\ud800" * 100 * rank, "big": 2**80 + rank, "small": 0.1 + rank, "none": None}
        seen: dict[str, Any] = {
            "shared": processes.share_from_main(mine),
            "empty": processes.share_from_main("" if rank == 0 else "another"),
            "gathered": processes.gather(mine),
            "everywhere": processes.all_gather(mine),
        }
        seen["not_numbers"] = [repr(value) for value in processes.all_gather(float("nan") if rank else float("-inf"))]
        context.socket.gethostname = lambda: f"host{rank}"  # type: ignore[attr-defined]
        seen["same"] = refusal(processes, "abc")
        seen["one_odd"] = refusal(processes, "other" if rank == 1 else "abc")
        seen["all_odd"] = refusal(processes, f"own{rank}")
        (Path(out) / f"rank{rank}.json").write_text(json.dumps(seen))
