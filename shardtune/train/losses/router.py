"""What does a mixture of experts add to its loss? The routers' load-balancing term, as in its own forward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardtune.model.router_loss import load_balancing, router_recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEPT = "kept_logits"


class RouterLoss:
    """Collects the routers' logits in a forward pass of the base model, and makes the auxiliary loss of them.

    transformers' own collecting hangs a hook on every attention layer as well and asks a context variable in each: at
    every one compiled code breaks in two. Here each router keeps its logits as an attribute.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        recorder = router_recorder(model)
        assert recorder is not None
        self.model = model
        self.routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        keep = partial(_keep, recorder.index)  # one for all: layers share their compiled code
        for router in self.routers:
            router.register_forward_hook(keep)

    def __call__(self, attention_mask: Tensor | None) -> Tensor:
        """Of the forward pass that was just made."""
        balance = load_balancing(self.model)
        assert balance is not None
        loss: Tensor = balance(self.take(), self.model.num_experts, self.model.num_experts_per_tok, attention_mask)
        return loss

    def take(self) -> tuple[Tensor, ...]:
        logits = tuple(getattr(router, _KEPT) for router in self.routers)
        for router, own in zip(self.routers, logits, strict=True):
            setattr(router, _KEPT, None)
            if own.requires_grad:
                # A layer that is computed again keeps them again, and with them all it has computed.
                own.register_hook(partial(_forget, router))
        return logits


def _keep(index: int, router: nn.Module, _args: Any, output: Any) -> None:
    setattr(router, _KEPT, output[index])


def _forget(router: nn.Module, _gradient: Tensor) -> None:
    setattr(router, _KEPT, None)
