"""How does LoRA on parameters compute? PEFT's parameters, names and files, with low-rank products.

PEFT's own forward writes `W + scaling * B A` out for all experts, each time; over a weight held in FP8 the adapter then
has no effect and no gradient. Here its wrappers keep what they hold and what they save, and only their forward changes:
grouped products for routed experts, two products for the weight of a linear layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from shardtune.errors import ShardtuneError
from shardtune.kernels.experts import Activation
from shardtune.kernels.fp8 import CODES
from shardtune.model.experts import WEIGHTS, check_experts, expert_weight, experts_kernel
from shardtune.model.quantized import Fp8Linear

if TYPE_CHECKING:
    from peft import PeftModel


def use_grouped_products(model: PeftModel) -> int:
    """Switch every adapter on fused experts to grouped products; call it before sharding.

    Parameters, their names and the adapter's files stay PEFT's, so plain PEFT loads what was trained.

    Returns:
        How many expert parameters are adapted (two for a layer whose `gate_up_proj` and `down_proj` both are).

    Raises:
        UserInputError: experts whose layout is not supported; the message names their class.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper) and module._param_ndim == 3]
    for wrapper in wrappers:
        experts = wrapper.get_base_layer()
        check_experts(experts)
        if wrapper.parameter_name not in WEIGHTS:
            raise ShardtuneError(
                f"{type(experts).__name__}.{wrapper.parameter_name} has an adapter that cannot be computed.",
                fix=f"Of fused experts, {' and '.join(WEIGHTS)} can be adapted.",
            )
    for wrapper in wrappers:
        wrapper.__class__ = GroupedParamWrapper
    return len(wrappers)


def use_linear_products(model: PeftModel) -> int:
    """Switch every adapter on the weight of a linear layer (PEFT's target_parameters) to products with its factors.

    Dense layers and shared experts of some mixtures are adapted so, because PEFT takes their names for the experts'.

    Returns:
        How many layers have one.
    """
    found = [module for module in model.modules() if type(module) is ParamWrapper and _is_linear_weight(module)]
    for wrapper in found:
        wrapper.__class__ = LinearParamWrapper
    return len(found)


def _is_linear_weight(wrapper: ParamWrapper) -> bool:
    # Not of a subclass, which may compute anything: Llama 4's router is one.
    return type(wrapper.base_layer) in (nn.Linear, Fp8Linear) and wrapper.parameter_name == "weight"


class _ProductWrapper(ParamWrapper):
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if self.get_param().dtype == CODES:
            # PEFT would add the adapter to the codes as if they were values.
            raise ShardtuneError(
                f"An adapter cannot be merged into {self.parameter_name} while it is held in FP8.",
                fix="Merge into the model in bf16 (model.base_precision: bf16).",
            )
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)


class LinearParamWrapper(_ProductWrapper):
    """PEFT's wrapper of a linear layer's weight: the layer's output, and the adapter's beside it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.disable_adapters or self.merged:
            return cast(Tensor, super().forward(x, *args, **kwargs))
        out = cast(Tensor, self.base_layer(x))
        for name in self.active_adapters:
            if name in self.lora_A:
                a, b = self.lora_A[name].weight, self.lora_B[name].weight
                low_rank = F.linear(F.linear(x.to(a.dtype), a), b) * self.scaling[name]
                out = out + low_rank.to(out.dtype)
        return out


class GroupedParamWrapper(_ProductWrapper):
    """PEFT's wrapper of one expert parameter. The outermost of a nest computes for all of them."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        experts, factors = _active_factors(self)
        if not factors:
            return cast(Tensor, experts(x, *args, **kwargs))
        return _forward(experts, factors, x, *args, **kwargs)


# PEFT finds its wrappers by this name when it puts a second adapter on a model.
GroupedParamWrapper.__name__ = LinearParamWrapper.__name__ = ParamWrapper.__name__

_Factors = dict[str, tuple[tuple[Tensor, Tensor], float]]


def _active_factors(outermost: ParamWrapper) -> tuple[nn.Module, _Factors]:
    """The experts under a nest of wrappers and, for each adapted parameter, ((A, B), scaling)."""
    factors: _Factors = {}
    layer: nn.Module = outermost
    while isinstance(layer, ParamWrapper):
        if layer.disable_adapters:
            if layer.merged:
                layer.unmerge()
        elif not layer.merged:
            names = [name for name in layer.active_adapters if name in layer.lora_A]
            if names:
                factors[layer.parameter_name] = _joined(layer, names)
        layer = layer.base_layer
    return layer, factors


def _joined(wrapper: ParamWrapper, names: list[str]) -> tuple[tuple[Tensor, Tensor], float]:
    pairs = [_factors(wrapper, name) for name in names]
    if len(pairs) == 1:
        return pairs[0], wrapper.scaling[names[0]]
    # The sum of several adapters is one of their ranks together.
    a = torch.cat([a for a, _ in pairs], dim=1)
    b = torch.cat([b * wrapper.scaling[name] for (_, b), name in zip(pairs, names, strict=True)], dim=2)
    return (a, b), 1.0


def _factors(wrapper: ParamWrapper, name: str) -> tuple[Tensor, Tensor]:
    """PEFT keeps A as (E * r, in), expert after expert, and B as (out, r * E), with the experts innermost."""
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    experts = wrapper.num_experts
    return a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)


def _forward(
    experts: nn.Module, factors: _Factors, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    gate_up, down = (expert_weight(experts, name, *factors.get(name, (None, 1.0))) for name in WEIGHTS)
    activation = cast(Activation, experts._apply_gate)
    return experts_kernel(experts)(hidden_states, top_k_index, top_k_weights, gate_up, down, activation)
