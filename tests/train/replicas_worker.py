"""Run on ranks by test_replicas.py: training runs in which one rank's memory or files differ, and how each ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from interrupted import run

from shardtune.errors import ShardtuneError
from shardtune.train.proof import ProofOfTraining, local


def main(config: str, ports: str, cases: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank)  # every rank is a node
    for (name, case), port in zip(json.loads(cases).items(), json.loads(ports), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        os.chdir(case.get("folders", {}).get(str(rank), Path(config).parent))
        ended = {"kind": "done"}
        try:
            with flipped(case.get("flip"), rank):
                run(Path(config), *case["overrides"], run_id=name)
        except ShardtuneError as error:
            ended = {"kind": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}
        (Path(out) / f"{name}-rank{rank}.json").write_text(json.dumps(ended))


@contextmanager
def flipped(flip: dict | None, rank: int) -> Iterator[None]:
    """One bit of a tensor in the memory of one rank: once it is loaded (step 0), or at the end of a step."""
    if flip is None or flip["rank"] != rank:
        yield
        return
    begin, optimizer = ProofOfTraining.begin, ProofOfTraining.after_optimizer

    def flip_bit(model: torch.nn.Module) -> None:
        (tensor,) = (tensor for name, tensor in model.named_parameters() if name.endswith(flip["name"]))
        held = local(tensor).detach()
        held.view(-1).view(torch.uint8)[held.nbytes // 2] ^= 1

    def at_begin(self: ProofOfTraining, model: torch.nn.Module, first_step: int) -> None:
        if flip["step"] == 0:
            flip_bit(model)
        begin(self, model, first_step)

    def at_end(self: ProofOfTraining, step: int, used: torch.optim.Optimizer) -> None:
        optimizer(self, step, used)
        if step == flip["step"]:
            flip_bit(self.model)

    with (
        mock.patch.object(ProofOfTraining, "begin", at_begin),
        mock.patch.object(ProofOfTraining, "after_optimizer", at_end),
    ):
        yield
