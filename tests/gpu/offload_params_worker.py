"""Run by test_offload_params_gpu.py: runs one after the other, each of which writes down where its tensors are at the end."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from interrupted import run
from torch.distributed.tensor import DTensor

from shardtune.train import run as train_run


def devices(model: torch.nn.Module) -> dict[str, dict[str, int]]:
    def of(tensors: Any) -> dict[str, int]:
        held = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        return dict(Counter(tensor.device.type for tensor in held))

    return {
        "parameters": of(model.parameters()),
        "buffers": of(model.buffers()),
        "pinned": {"yes": sum(p.to_local().is_pinned() for p in model.parameters() if isinstance(p, DTensor))},
    }


def main(config: str, sessions: str) -> None:
    stock = train_run.write_final

    def write_final(training: Any, source: Any) -> Path:
        found = {**devices(training.setup.model), "peak": torch.cuda.max_memory_allocated()}
        (training.context.folder / "devices.json").write_text(json.dumps(found))
        return stock(training, source)

    train_run.write_final = write_final
    for session in json.loads(sessions):
        torch.cuda.reset_peak_memory_stats()
        code = run(Path(config), *session.pop("overrides", ()), **session)
        assert code == (None if "crash_at" in session else 0), (session, code)


if __name__ == "__main__":
    main(*sys.argv[1:])
