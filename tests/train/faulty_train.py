"""`shardtune train` with a fault in it: FAULT=KIND:RANK:STEP. Called as the command is, and starts itself as its ranks.

Kinds: nan (the loss of the second micro-batch), oom (an allocation in the second layer), slow (forward passes from that
step on), starve (batches from that step on).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from shardtune.launch import start

KIND, RANK, STEP = os.environ["FAULT"].split(":")
_to_the_end = ExitStack()  # of this process
_command = start._command
start._command = lambda *words: [sys.executable, __file__, *_command(*words)[3:]]


def spoil() -> None:
    """In the rank it is meant for."""
    import torch
    from spoilt import not_a_number, spoilt
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from shardtune.train.loop import TrainingLoop

    layer, next_batches = LlamaDecoderLayer.forward, TrainingLoop._next
    at = [0]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if KIND == "oom" and at[0] == int(STEP) and self.self_attn.layer_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has no more.")
        if KIND == "slow" and at[0] >= int(STEP):
            time.sleep(0.05)
        return layer(self, *args, **kwargs)

    def slowly(self: TrainingLoop, steps: Any) -> Any:
        at[0] = self.state.global_step + 1
        if KIND != "starve" or at[0] < int(STEP):
            return next_batches(self, steps)

        def late() -> Any:
            time.sleep(0.2 * self.config.train.gradient_accumulation_steps)
            yield next(steps, None)  # `yield from` would close the batches with this generator

        return next_batches(self, late())

    LlamaDecoderLayer.forward, TrainingLoop._next = forward, slowly  # type: ignore[method-assign]
    if KIND == "nan":
        _to_the_end.enter_context(spoilt({int(STEP): not_a_number}, micro=1))


if os.environ.get("RANK", "0" if "--nproc" not in sys.argv else "") == RANK:
    spoil()

from shardtune.cli.main import main  # noqa: E402 - after the faults

main()
