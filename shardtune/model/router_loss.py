"""Does a model's forward add a load-balancing loss of its routers, and from what? Read from transformers' own code."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from transformers.utils.output_capturing import OutputRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shardtune.model.outline import RouterLoss


def router_loss_of(model: PreTrainedModel) -> RouterLoss:
    """Whether it has one; `usual` where it can be computed beside the fused loss.

    A model whose own forward computes no such loss has none, whatever its config says: Llama 4's has a coefficient.
    """
    balance = load_balancing(model)
    if balance is None or not hasattr(model.config.get_text_config(), "output_router_logits"):
        return "none"
    sizes = all(isinstance(getattr(model, name, None), int) for name in ("num_experts", "num_experts_per_tok"))
    usual = len(inspect.signature(balance).parameters) == 4 and sizes and router_recorder(model) is not None
    return "usual" if usual else "own"


def load_balancing(model: PreTrainedModel) -> Any:
    """The function that the model's forward calls, from the file of its class, or of one this inherits from."""
    files = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    return next((file.load_balancing_loss_func for file in files if hasattr(file, "load_balancing_loss_func")), None)


def router_recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """Which modules give router logits, by the base model's own account."""
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    return recorder if isinstance(recorder, OutputRecorder) and recorder.target_class is not None else None
