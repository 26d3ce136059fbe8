"""How do routed experts compute? Tokens sorted by expert once and multiplied group by group, if their layout allows it.

transformers' own forward copies tokens to their experts and adds what comes back at their indices, in backward by
writing into zeros. `kernels.experts` permutes in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from shardtune.errors import ShardtuneError, UserInputError
from shardtune.kernels import fp8
from shardtune.kernels.experts import Activation, ExpertWeight, routed_experts, routed_experts_reference
from shardtune.model.stored_names import SCALE

WEIGHTS = ("gate_up_proj", "down_proj")


class GroupedExperts(nn.Module):
    """Mixed into a class of routed experts: their parameters and names, our forward."""

    fp8_blocks: dict[str, fp8.Block]
    fp8_compute_weights: frozenset[str] = frozenset()  # names of weights in FP8 that are multiplied as they are
    _apply_gate: Activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_up, down = (expert_weight(self, name) for name in WEIGHTS)
        return experts_kernel(self)(hidden_states, top_k_index, top_k_weights, gate_up, down, self._apply_gate)


def use_grouped_experts(model: nn.Module) -> tuple[int, int]:
    """Switch all routed experts whose layout is supported to grouped products; call it before sharding.

    Returns:
        How many layers' experts compute so now, and how many layers have fused experts.
    """
    found = fused_experts(model)
    for experts in found:
        if not isinstance(experts, GroupedExperts) and why_not_grouped(experts) is None:
            experts.__class__ = grouped_class(type(experts), GroupedExperts)  # type: ignore[arg-type]
    return sum(isinstance(experts, GroupedExperts) for experts in found), len(found)


def use_expert_loops(model: nn.Module, *, compiled: bool) -> int:
    """Compute routed experts without transformers' own forward (adapted, or stored in FP8) in a loop over experts.

    Args:
        compiled: The layers around them will be; a loop over groups whose sizes are not known beforehand cannot.

    Returns:
        How many layers have fused experts.
    """
    found = fused_experts(model)
    compute = torch.compiler.disable(routed_experts_reference) if compiled else routed_experts_reference
    for experts in found:
        experts.compute = compute  # type: ignore[assignment]
    return len(found)


def experts_kernel(experts: nn.Module) -> Callable[..., Tensor]:
    """How these experts compute: `routed_experts`, or its twin."""
    compute: Callable[..., Tensor] = getattr(experts, "compute", routed_experts)
    return compute


def fused_experts(model: nn.Module) -> list[nn.Module]:
    """The routed experts of each layer that hold the weights of all experts in one tensor."""
    return [module for module in model.modules() if any(is_fused(w) for w in module._parameters.values())]


@cache
def grouped_class(experts: type[nn.Module], mixed_in: type[GroupedExperts]) -> type[GroupedExperts]:
    # One class for all layers: torch.compile compiles a layer anew whose experts are of another class.
    return type(mixed_in.__name__ + experts.__name__, (mixed_in, experts), {})


def expert_weight(
    experts: nn.Module, name: str, lora: tuple[Tensor, Tensor] | None = None, scaling: float = 1.0
) -> ExpertWeight:
    """The weight `name` of fused experts as it is stored, with the factors (E, r, in) and (E, out, r) of an adapter."""
    weight = getattr(experts, name)
    blocks: dict[str, fp8.Block] = getattr(experts, "fp8_blocks", {})
    a, b = lora or (None, None)
    if name not in blocks:
        return ExpertWeight(weight, lora_a=a, lora_b=b, scaling=scaling)
    check_fp8_dtypes(experts, name)
    how = name in getattr(experts, "fp8_compute_weights", ())
    return ExpertWeight(weight, getattr(experts, name + SCALE), blocks[name], a, b, scaling, how)


def check_experts(experts: nn.Module) -> None:
    """That grouped products mean for these experts what their own forward means.

    Raises:
        UserInputError: naming the class and what it has that is not supported.
    """
    if (why := why_not_grouped(experts)) is not None:
        raise UserInputError(
            f"Routed experts of class {type(experts).__name__} support neither LoRA nor FP8 storage.",
            why=f"They have {why}; supported are gated experts without bias, fused as gate_up_proj and down_proj of "
            "shape (experts, out, in).",
            fix="Set lora.experts: false and model.base_precision: bf16.",
        )


def why_not_grouped(experts: nn.Module) -> str | None:
    """What these experts have that grouped products do not know of; None if nothing."""
    needed: dict[str, object] = {
        "has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False,
        "_is_expert_parallel": False,
    }  # fmt: skip
    other = [
        f"{name}={getattr(experts, name, None)}" for name, value in needed.items() if _differs(experts, name, value)
    ]
    missing = [name for name in (*WEIGHTS, "_apply_gate") if not hasattr(experts, name)]
    return ", ".join(other + [f"no {name}" for name in missing]) or None


def check_fp8_dtypes(owner: nn.Module, name: str) -> None:
    """Check that a weight stored in FP8 is still codes with float32 scales when it is multiplied."""
    weight, scale = getattr(owner, name), getattr(owner, name + SCALE)
    if weight.dtype != fp8.CODES or scale.dtype != torch.float32:
        raise ShardtuneError(
            f"{type(owner).__name__}.{name} is stored in FP8 but was cast to {weight.dtype} with {scale.dtype} scales.",
            why="Something cast the model's parameters, such as .to(dtype) or a mixed-precision policy.",
            fix="Please report this with the config; model.base_precision: bf16 avoids it.",
        )


def is_fused(weight: Tensor | None) -> bool:
    return weight is not None and weight.dim() == 3


def _differs(experts: nn.Module, name: str, value: object) -> bool:
    # Older transformers lack the two newest attributes, and then have none of what they announce.
    absent = value if name in ("has_post_expert_norm", "_is_expert_parallel") else None
    return getattr(experts, name, absent) != value
