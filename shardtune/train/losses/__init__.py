"""What is minimised? A loss of each supervised token, and of routers where a model has them.

A token's loss is one file here (`nll`, `dft`, `label_smoothing`): an eager form that defines it, and a fused form that
needs no logits in memory. Another one is another file with its `LOSS`, named as `train.loss` names it in the config.
"""

from __future__ import annotations

from shardtune.train.losses.loss import Loss, LossOutput, build_loss

__all__ = ["Loss", "LossOutput", "build_loss"]
