"""How likely does a model find each row? The summed negative log-likelihood of its supervised tokens, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from shardtune.data.collate import REAL_TOKENS, SUPERVISED, TARGETS, Collator

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from peft import PeftModel

    from shardtune.data.prepared import Prepared

_LOGIT_BYTES = 256 << 20  # of the positions that are scored at once, in float32


def row_losses(
    model: PeftModel,
    prepared: Prepared,
    rows: Sequence[int],
    pad_token_id: int,
    *,
    vocabulary: int,
    batch_tokens: int,
    done: Callable[[int], None],
) -> NDArray[np.float64]:
    """The summed loss of each row, in the order of `rows`: what training's evaluation sums over all of them.

    Rows are padded on the right, those of like length together; the head runs on supervised positions only.

    Args:
        model: In the state that is to be evaluated.
        vocabulary: Rows of the embedding that count; those behind have no weights (the base's, of tokens it lacks).
        batch_tokens: Of a batch with its padding.
        done: Called with the number of rows that are finished.

    Raises:
        torch.cuda.OutOfMemoryError: one row alone does not fit.
    """
    collator = Collator(pad_token_id, "padded")
    losses = np.zeros(len(rows))
    device = next(model.parameters()).device
    finished = 0
    pending = list(_batches(prepared, rows, batch_tokens))[::-1]
    while pending:
        places = pending.pop()
        batch = collator([[prepared.row(rows[place])] for place in places])
        batch.pop(REAL_TOKENS)
        try:
            losses[places] = _batch_losses(model, batch, len(places), device, vocabulary)
        except torch.cuda.OutOfMemoryError:
            if len(places) == 1:
                raise
            torch.cuda.empty_cache()
            half = len(places) // 2
            pending += [places[half:], places[:half]]
            continue
        finished += len(places)
        done(finished)
    return losses


def _batches(prepared: Prepared, rows: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places in `rows`, the longest rows first: what does not fit fails at once, and time left is not too low."""
    lengths = prepared.lengths
    order = sorted(range(len(rows)), key=lambda place: -int(lengths[rows[place]]))
    start = 0
    while start < len(order):
        longest = int(lengths[rows[order[start]]])
        stop = start + max(1, batch_tokens // longest)
        yield order[start:stop]
        start = stop


def _batch_losses(
    model: PeftModel, batch: dict[str, Any], rows: int, device: torch.device, vocabulary: int
) -> NDArray[np.float64]:
    where, targets = batch[SUPERVISED], batch[TARGETS].to(device)
    width = batch["input_ids"].shape[1]
    here = where.to(device)

    def supervised_only(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return inputs[0].flatten(0, 1)[here][None], *inputs[1:]

    head = model.get_base_model().get_output_embeddings()
    hook = head.register_forward_pre_hook(supervised_only)
    try:
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"].to(device),
                attention_mask=batch["attention_mask"].to(device),
                use_cache=False,
            ).logits[0, :, :vocabulary]
            chunk = max(1, _LOGIT_BYTES // (4 * logits.shape[-1]))
            parts = zip(logits.split(chunk), targets.split(chunk), strict=True)
            each = torch.cat([F.cross_entropy(part.float(), wanted, reduction="none") for part, wanted in parts])
    finally:
        hook.remove()
    summed = torch.zeros(rows, dtype=torch.float64)
    summed.index_add_(0, where // width, each.double().cpu())
    return summed.numpy()
