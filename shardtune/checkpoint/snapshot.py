"""What does a checkpoint hold? Everything a run needs to go on as if nothing had happened; no pickle in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from shardtune.checkpoint.adapter import read_adapter, write_adapter_files, write_tensors
from shardtune.checkpoint.manifest import TRAINER
from shardtune.durable import write_file

if TYPE_CHECKING:
    from peft import PeftConfig

OPTIMIZER = "optimizer.safetensors"
_RNG = re.compile(r"rng-rank(\d+)\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two steps, on the CPU of one process.

    Attributes:
        adapter: The adapter's tensors by PEFT's names.
        optimizer: Its state by parameter name (`checkpoint/optimizer.py`).
        trainer: Step, epoch, schedule, log lines, sums since the last line, position in the data, settings.
        rng: One blob per rank (`checkpoint/rng.py`).
    """

    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    trainer: dict[str, Any]
    rng: list[bytes]

    @property
    def size(self) -> int:
        """Bytes in memory, about what they are on the disk."""
        tensors = sum(t.numel() * t.element_size() for part in (self.adapter, self.optimizer) for t in part.values())
        return tensors + sum(map(len, self.rng))

    def write(self, folder: Path, config: PeftConfig) -> None:
        write_adapter_files(config, self.adapter, folder)
        if self.optimizer:  # SGD without momentum has none
            write_tensors(folder / OPTIMIZER, self.optimizer)
        write_file(folder / TRAINER, json.dumps(self.trainer) + "\n")
        for rank, blob in enumerate(self.rng):
            write_file(folder / f"rng-rank{rank}.safetensors", blob)


def read_snapshot(folder: Path) -> Snapshot:
    """Read a checkpoint that was verified before."""
    ranks = sorted((int(m.group(1)), path) for path in folder.iterdir() if (m := _RNG.fullmatch(path.name)))
    return Snapshot(
        adapter=read_adapter(folder),
        optimizer=load_file(folder / OPTIMIZER) if (folder / OPTIMIZER).exists() else {},
        trainer=json.loads((folder / TRAINER).read_text(encoding="utf-8")),
        rng=[path.read_bytes() for _, path in ranks],
    )
