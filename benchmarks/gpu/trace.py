"""Where does the time of a step go? `python benchmarks/gpu/trace.py dense-4k [settings]`: kernels of three steps."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES
from ours import config_of

FIRST, STEPS = 8, 3


def main() -> None:
    name, *overrides = sys.argv[1:]
    os.environ |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    import torch
    from torch.profiler import ProfilerActivity, profile

    from shardtune.cli.main import main as cli
    from shardtune.train.trainer import ShardedSFTTrainer

    kernels: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    stock = ShardedSFTTrainer.training_step
    state: dict[str, object] = {}

    def traced(self: ShardedSFTTrainer, *args: object, **kwargs: object) -> torch.Tensor:
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
            for kernel, ms in sorted(kernels.items(), key=lambda item: -item[1])[:45]:
                print(f"{ms:8.2f} ms {calls[kernel] / STEPS:7.1f}×  {re.sub(r'<.*', '', kernel)[:110]}", flush=True)
        return stock(self, *args, **kwargs)

    ShardedSFTTrainer.training_step = traced
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
