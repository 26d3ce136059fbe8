"""Every optimizer does to shards, on 1 to 3 ranks, what torch's own does to whole tensors, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from optimizers_worker import CASES, FAST
from ranks import on_ranks

from shardtune.train.optimizers import OPTIMIZERS

WORKER = Path(__file__).parent / "optimizers_worker.py"
CPU = torch.device("cpu")
PROMISES = ("moved", "as torch on shards", "as torch unsharded", "on shards", "state")


def check_on_ranks(environment: dict[str, str], out: Path, cases: tuple[str, ...]) -> None:
    on_ranks(environment, WORKER, (1, 2, 3, 1), out, *cases)  # each resumes what the one before has saved
    for world in (1, 2, 3):
        for rank in range(world):
            seen = json.loads((out / f"rank{rank}of{world}.json").read_text())
            promised = dict.fromkeys((*PROMISES, "saved as by other ranks", "resumed"), True)
            assert seen == dict.fromkeys(cases, promised), f"rank {rank} of {world}"


def test_adamw_and_sgd_are_the_same_sharded_unsharded_and_resumed_on_other_ranks(
    environment: dict[str, str], tmp_path: Path
) -> None:
    check_on_ranks(environment, tmp_path, FAST)


@pytest.mark.slow
def test_all_other_optimizers_are_the_same_sharded_unsharded_and_resumed_on_other_ranks(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert {optim for optim, _ in CASES.values()} == set(OPTIMIZERS)
    check_on_ranks(environment, tmp_path, tuple(case for case in CASES if case not in FAST))
