"""What does a mixture of experts add to its loss? The routers' load-balancing term, as in its own forward."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEPT = "kept_logits"


def coefficient(model: PreTrainedModel, given: float | None) -> float:
    """The weight of the auxiliary loss in training, by TRL's rule: as given, or the model config's own. 0 = none.

    A model whose own forward computes no such loss has none, whatever its config says: Llama 4's has a coefficient.

    Raises:
        UserInputError: one is given, and the model has no auxiliary loss.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits") or _load_balancing(model) is None:
        if given:
            raise UserInputError(
                f"train.router_aux_loss_coef is {given}, but {type(model).__name__} has no auxiliary loss.",
                why="It is not a mixture of experts whose forward computes one from its router logits.",
                fix="Remove train.router_aux_loss_coef.",
            )
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) if given is None else given)


def unused_notice(model: PreTrainedModel) -> str | None:
    """Said where the model's config has a coefficient and its forward nothing to weigh with it."""
    own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    if not own or coefficient(model, None):
        return None
    return (
        f"The loss is the cross-entropy alone: {type(model).__name__} computes no auxiliary loss for its routers, so "
        f"router_aux_loss_coef ({own:g}) in the model's config has no effect."
    )


def why_not(model: PreTrainedModel) -> str | None:
    """Why this model's auxiliary loss cannot be computed beside the fused loss; None = it can."""
    balance = _load_balancing(model)
    usual = balance is not None and len(inspect.signature(balance).parameters) == 4
    sizes = all(isinstance(getattr(model, name, None), int) for name in ("num_experts", "num_experts_per_tok"))
    if usual and sizes and _recorder(model) is not None:
        return None
    return f"{type(model).__name__} computes the router's auxiliary loss in a way of its own"


class RouterLoss:
    """Collects the routers' logits in a forward pass of the base model, and makes the auxiliary loss of them.

    transformers' own collecting hangs a hook on every attention layer as well and asks a context variable in each: at
    every one compiled code breaks in two. Here each router keeps its logits as an attribute.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        recorder = _recorder(model)
        assert recorder is not None
        self.model = model
        self.routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        keep = partial(_keep, recorder.index)  # one for all: layers share their compiled code
        for router in self.routers:
            router.register_forward_hook(keep)

    def __call__(self, attention_mask: Tensor | None) -> Tensor:
        """Of the forward pass that was just made."""
        balance = _load_balancing(self.model)
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


def _recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """Which modules give router logits, by the base model's own account."""
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    return recorder if isinstance(recorder, OutputRecorder) and recorder.target_class is not None else None


def _load_balancing(model: PreTrainedModel) -> Any:
    """The function that the model's forward calls, from the file of its class, or of one this inherits from."""
    files = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    return next((file.load_balancing_loss_func for file in files if hasattr(file, "load_balancing_loss_func")), None)
