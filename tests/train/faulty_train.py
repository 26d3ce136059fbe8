"""`shardtune train` with a fault in it: FAULT=KIND:RANK:STEP. Called as the command is, and starts itself as its ranks.

Kinds: nan (the loss of the second micro-batch), oom (an allocation in the second layer), slow (forward passes from that
step on), starve (batches from that step on).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from shardtune.launch import start

KIND, RANK, STEP = os.environ["FAULT"].split(":")
_command = start._command
start._command = lambda *words: [sys.executable, __file__, *_command(*words)[3:]]


def spoil() -> None:
    """In the rank it is meant for."""
    import torch
    from spoilt import not_a_number
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from shardtune.train.trainer import ShardedSFTTrainer

    loss, layer, batches = ShardedSFTTrainer._loss_of, LlamaDecoderLayer.forward, ShardedSFTTrainer.get_batch_samples
    running: list[Any] = []

    def at() -> int:
        return running[0].state.global_step + 1 if running else 0

    def loss_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        running[:] = [self]
        found = loss(self, *args, **kwargs)
        return not_a_number(found) if KIND == "nan" and at() == int(STEP) and len(self.micro_losses) == 1 else found

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if KIND == "oom" and at() == int(STEP) and self.self_attn.layer_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has no more.")
        if KIND == "slow" and at() >= int(STEP):
            time.sleep(0.05)
        return layer(self, *args, **kwargs)

    def get_batch_samples(self: Any, batches_of_epoch: Any, *args: Any) -> Any:
        def slowly() -> Any:
            for batch in batches_of_epoch:
                time.sleep(0.2)
                yield batch

        late = KIND == "starve" and self.state.global_step + 1 >= int(STEP)
        return batches(self, slowly() if late else batches_of_epoch, *args)

    LlamaDecoderLayer.forward = forward
    ShardedSFTTrainer._loss_of, ShardedSFTTrainer.get_batch_samples = loss_of, get_batch_samples  # type: ignore[method-assign]


if os.environ.get("RANK", "0" if "--nproc" not in sys.argv else "") == RANK:
    spoil()

from shardtune.cli.main import main  # noqa: E402 - after the faults

main()
