"""How does a model give its loss without its logits? By a forward of ours, for calls that name the loss they want."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from shardtune.adapters.new_tokens import head_and_rows
from shardtune.data.collate import SUPERVISED, TARGETS
from shardtune.kernels.cross_entropy import linear_cross_entropy
from shardtune.model.families.generic import decoder_of
from shardtune.train.losses.router import RouterLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOKEN_LOSS = "token_loss"  # keyword of a forward pass that is to give this loss instead of logits


def use_fused_loss(model: PreTrainedModel, *, causal: bool, router_coefficient: float = 0.0) -> None:
    """From now on a call with `token_loss` is answered with (summed loss, `token_stats`, routers' loss or None).

    A tuple, since sharding looks for the tensors of what a forward pass returns. The call has `supervised` and
    `targets` beside it, and no labels; others go to the model's own forward.

    Args:
        causal: No token sees one behind it. Padding stands at the end of rows, so such a model needs no mask for it,
            and without one attention takes its fastest kernel, whatever the rows' lengths.
        router_coefficient: With any but 0 a call may ask for the routers' auxiliary loss too (`output_router_logits`).
    """
    stock = model.forward
    routers = RouterLoss(model) if router_coefficient else None

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        token_loss = kwargs.pop(TOKEN_LOSS, None)
        if token_loss is None:
            return stock(*args, **kwargs)
        where, targets = kwargs.pop(SUPERVISED), kwargs.pop(TARGETS)
        kwargs.pop("labels", None)  # PEFT hands them down, None or not
        mask = kwargs.get("attention_mask")
        if causal:
            kwargs.pop("attention_mask", None)
        with_aux_loss = kwargs.get("output_router_logits", False)
        if routers is not None:
            kwargs["output_router_logits"] = False  # by transformers, that is, whatever the config says
        hidden = decoder_of(self)(*args, **kwargs).last_hidden_state
        aux_loss = routers(mask) if routers is not None and with_aux_loss else None
        # Looked up now: sharding has put the gathered weight in its place.
        head, ids, rows = head_and_rows(self.get_output_embeddings())
        loss, token_stats = linear_cross_entropy(hidden.flatten(0, -2), head, where, targets, token_loss, ids, rows)
        return loss, token_stats, aux_loss

    model.forward = types.MethodType(forward, model)
    model.calls_no_submodules = True  # type: ignore[assignment]  # the head is multiplied with, not called
