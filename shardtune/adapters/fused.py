"""How does LoRA on a linear layer compute? PEFT's parameters, names and files, with one fused operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from shardtune.kernels.fp8_lora import fp8_lora_linear
from shardtune.kernels.lora import lora_linear
from shardtune.model.quantized import Fp8Linear

if TYPE_CHECKING:
    from peft import PeftModel


def use_fused_lora(model: PeftModel) -> tuple[int, int]:
    """Switch every plain LoRA layer on a linear layer, also one held in FP8, to one operator; call it before sharding.

    A layer with a variant such as DoRA, or on anything else, keeps PEFT's own forward.

    Returns:
        How many layers were switched, and how many linear layers with LoRA there are.
    """
    found = [module for module in model.modules() if isinstance(module, Linear)]
    plain = [layer for layer in found if _is_plain(layer)]
    for layer in plain:
        layer.__class__ = FusedLoraLinear
    return len(plain), len(found)


def _is_plain(layer: Linear) -> bool:
    names = list(layer.lora_A)
    return (
        type(layer) is Linear
        and type(layer.base_layer) in (nn.Linear, Fp8Linear)
        and len(names) == 1
        and not layer.lora_variant
        and not layer.lora_bias[names[0]]
    )


class FusedLoraLinear(Linear):
    """PEFT's LoRA layer; where its adapter is simply active, it computes in one operator."""

    calls_no_submodules = True  # hooks on them see nothing

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = next(iter(self.lora_A))
        base, a, b = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        simply_active = (
            not (args or kwargs or self._disable_adapters or self.merged_adapters)
            and self._active_adapter in (name, [name])
            and a.dtype == x.dtype
            and (isinstance(base, Fp8Linear) or base.weight.dtype == x.dtype)
        )
        if not simply_active:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        dropout = self.lora_dropout[name]
        dropped = dropout(x) if self.training and not isinstance(dropout, nn.Identity) else None
        if not isinstance(base, Fp8Linear):
            return lora_linear(x, base.weight, base.bias, a, b, self.scaling[name], dropped)
        codes, scale, block = base.fp8_weight()
        return fp8_lora_linear(
            x, codes, scale, block, base.bias, a, b, self.scaling[name], dropped, "weight" in base.fp8_compute_weights
        )


# PEFT finds its layers by this name when it puts a second adapter on a model.
FusedLoraLinear.__name__ = Linear.__name__
