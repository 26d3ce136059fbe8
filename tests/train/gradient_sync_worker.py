"""Run on ranks by test_loop.py: the same training with gradients reduced once a step, and at every micro-batch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from interrupted import run
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from shardtune.parallel.shard import GradientSync


def main(config: str, ports: str, out: str) -> None:
    reduced = [0]
    foreach_reduce = _fsdp_param_group.foreach_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        reduced[0] += 1
        return foreach_reduce(*args, **kwargs)

    _fsdp_param_group.foreach_reduce = counted
    begin, counts = GradientSync.__init__, {}

    def every(self: GradientSync, *args: Any) -> None:
        begin(self, *args)
        assert self.units
        self.units = []

    for port, name in zip(json.loads(ports), ("once", "every"), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        GradientSync.__init__ = begin if name == "once" else every  # type: ignore[method-assign]
        before = reduced[0]
        assert run(Path(config), run_id=name) == 0
        counts[name] = reduced[0] - before
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(counts))
