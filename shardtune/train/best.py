"""Which weights are published? With `load_best_model_at_end` the best of which every byte is right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardtune.checkpoint.adapter import WEIGHTS, load_adapter, read_adapter
from shardtune.checkpoint.manifest import Damage
from shardtune.checkpoint.store import CheckpointStore, DamagedCheckpoint, UnreadableStoreError
from shardtune.terminal import warn

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.train.context import RunContext


@dataclass(frozen=True)
class Best:
    step: int
    eval_loss: float


def load_best(
    context: RunContext, model: PeftModel, store: CheckpointStore, now: int, loss: float | None
) -> Best | None:
    """Put the adapter of the best sound checkpoint into the model. A collective; rank 0 alone reads.

    A damaged one is named and set aside, and the next best is taken.

    Args:
        now: The step the model is at, with its eval `loss`: these weights need no reading, and may be the best.

    Returns:
        None where nothing sound was evaluated: the model stays as it is.
    """
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, Any] | None = None
    if context.processes.is_main:
        best: Best | None = None
        try:
            best, tensors, damaged = _find(store, now, loss)
            _tell(context, store, best, damaged, now)
        except UnreadableStoreError as error:
            text = f"{error.what} {error.why} The final adapter is that of the last step ({now})."
            warn(context.console, context.events, "checkpoint", text)
        if best is not None:
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            found = {"step": best.step, "eval_loss": best.eval_loss, "shapes": shapes}
    found = context.processes.share_from_main(found)
    if found is None:
        return None
    if found["shapes"]:
        others = {name: torch.empty(shape, device="meta") for name, shape in found["shapes"].items()}
        load_adapter(model, tensors or others)
    return Best(found["step"], found["eval_loss"])


def _find(
    store: CheckpointStore, now: int, loss: float | None
) -> tuple[Best | None, dict[str, torch.Tensor], list[DamagedCheckpoint]]:
    """The best of which every byte is right, its tensors unless the model holds them, and those passed over."""
    # One that does not even say its eval loss may have been the best.
    damaged = [
        DamagedCheckpoint(step, tuple(store.verify(step))) for step in store.steps() if store.manifest(step) is None
    ]
    losses = dict(store.by_eval_loss())
    if loss is not None and math.isfinite(loss):
        losses[now] = loss
    for eval_loss, step in sorted((value, key) for key, value in losses.items()):
        if step == now:
            return Best(step, eval_loss), {}, damaged
        found = tuple(damage for damage in store.verify(step) if damage.is_fatal)
        if not found:
            try:
                with store.reading(step) as folder:
                    return Best(step, eval_loss), read_adapter(folder), damaged
            except OSError as error:
                found = (Damage(WEIGHTS, "unreadable", error.strerror or str(error)),)
        damaged.append(DamagedCheckpoint(step, found))
    return None, {}, damaged


def _tell(
    context: RunContext, store: CheckpointStore, best: Best | None, damaged: list[DamagedCheckpoint], now: int
) -> None:
    for one in damaged:
        try:
            store.set_aside(one.step)
            done = "was set aside"
        except OSError as error:
            done = f"could not be set aside ({error.strerror})"
        warn(context.console, context.events, "checkpoint", f"A checkpoint is damaged and {done}. {one}")
    if damaged:
        kept = f"of step {best.step} (eval loss {best.eval_loss:.4f}), the best that is sound" if best else ""
        text = f"The final adapter is that {kept or f'of the last step ({now}): no evaluated checkpoint is sound'}."
        warn(context.console, context.events, "checkpoint", text)
