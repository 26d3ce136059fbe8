"""Where does the time of a step go? `python benchmarks/gpu/trace.py dense-4k [settings]`: kernels of three steps."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES
from ours import config_of

FIRST, STEPS = 8, 3


def print_idle(events: list[Any]) -> None:
    """How long the device had nothing to do, by how long at a time, and between which kernels it had longest."""
    ends, gaps = 0.0, []
    before = None
    for event in sorted(events, key=lambda e: e.time_range.start):
        if before is not None and event.time_range.start > ends:
            gaps.append((event.time_range.start - ends, before.name, event.name))
        if event.time_range.end > ends:
            ends, before = event.time_range.end, event
    for low, high in ((0, 5), (5, 50), (50, 500), (500, 1e9)):
        some = [gap[0] for gap in gaps if low <= gap[0] < high]
        print(f"idle {low:.0f}-{high:.0f} us: {len(some) / STEPS:.0f} times, {sum(some) / 1000 / STEPS:.1f} ms a step")
    for length, one, other in sorted(gaps, reverse=True)[:8]:
        print(f"idle {length / 1000:.2f} ms after {one[:50]} before {other[:50]}")


def main() -> None:
    name, *overrides = sys.argv[1:]
    os.environ |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    import torch
    from torch.profiler import ProfilerActivity, profile

    from shardtune.cli.main import main as cli
    from shardtune.train.loop import TrainingLoop

    kernels: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    stock = TrainingLoop.train_step
    state: dict[str, object] = {}

    def traced(self: TrainingLoop, batches: list[dict[str, object]]) -> None:
        step = self.state.global_step
        if step == FIRST and "profile" not in state:
            torch.cuda.synchronize()
            state["profile"] = profile(activities=[ProfilerActivity.CUDA])
            state["profile"].__enter__()
        if step == FIRST + STEPS and "done" not in state:
            torch.cuda.synchronize()
            state["done"] = True
            state["profile"].__exit__(None, None, None)
            events = [e for e in state["profile"].events() if e.device_type == torch.autograd.DeviceType.CUDA]
            for event in events:
                kernels[event.name] += event.device_time / 1000 / STEPS
                calls[event.name] += 1
            span = (max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / 1000 / STEPS
            print(f"TRACE {name} {overrides}: {span:.1f} ms a step, kernels {sum(kernels.values()):.1f} ms")
            print_idle(events)
            for kernel, ms in sorted(kernels.items(), key=lambda item: -item[1])[:45]:
                print(f"{ms:8.2f} ms {calls[kernel] / STEPS:7.1f}×  {re.sub(r'<.*', '', kernel)[:110]}", flush=True)
        stock(self, batches)

    TrainingLoop.train_step = traced
    with tempfile.TemporaryDirectory() as place:
        config = config_of(CASES[name], Path(place))
        sys.argv = [
            "shardtune",
            "train",
            str(config),
            "--run-id",
            "trace",
            "-o",
            f"train.max_steps={FIRST + STEPS + 1}",
        ]
        for override in overrides:
            sys.argv += ["-o", override]
        cli()


if __name__ == "__main__":
    main()
