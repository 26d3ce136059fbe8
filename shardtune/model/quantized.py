"""How is a frozen base stored in FP8? Linear layers and routed experts whose weights are float8 codes with scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from shardtune.errors import ShardtuneError
from shardtune.kernels import fp8, fp8_operators, fp8_products
from shardtune.model.experts import (
    GroupedExperts,
    check_experts,
    check_fp8_dtypes,
    grouped_class,
    is_fused,
)
from shardtune.model.stored_names import SCALE

_NAN_CODE = 0x7F


class Fp8Linear(nn.Linear):
    """A linear layer whose frozen `weight` is float8 codes and `weight_scale_inv` their float32 scales.

    PEFT puts LoRA on it as on any linear layer.
    """

    weight_scale_inv: nn.Parameter
    fp8_blocks: dict[str, fp8.Block]
    fp8_compute_weights: frozenset[str] = frozenset()  # what `enable_fp8_compute` chose: the weight, or nothing
    # PEFT makes adapters in the dtype of the weight they stand beside, unless the layer names another: float32 values
    # that went through float8 would stay rounded.
    compute_dtype = torch.float32

    def fp8_weight(self) -> tuple[Tensor, Tensor, fp8.Block]:
        """Codes, scales and the block that shares one, as they have to be during a product."""
        check_fp8_dtypes(self, "weight")
        return self.weight, self.weight_scale_inv, self.fp8_blocks["weight"]

    def forward(self, input: Tensor) -> Tensor:
        return fp8_operators.linear(input, *self.fp8_weight(), self.bias, "weight" in self.fp8_compute_weights)


class Fp8Experts(GroupedExperts):
    """Mixed into a class of routed experts of which one or both weights are stored in FP8."""


def use_fp8_storage(model: nn.Module, blocks: Mapping[str, fp8.Block]) -> None:
    """Replace the named parameters by FP8 codes and scales, without values.

    Afterwards a name `X` is a frozen float8_e4m3fn parameter and `X_scale_inv` a frozen float32 one of the shape
    `fp8.scale_shape(X's shape, block)`. Nothing is quantised here: until both are filled, every value is NaN, so that a
    forgotten one shows in the first loss.

    Args:
        model: Before adapters and sharding, usually on the meta device.
        blocks: For each parameter's plain name, how many rows and columns share a scale.

    Raises:
        ShardtuneError: there is no such parameter, it is no linear or expert weight, or the block does not fit.
    """
    for name, block in blocks.items():
        owner_name, _, attribute = name.rpartition(".")
        owner = _owner(model, owner_name, name)
        weight = owner._parameters.get(attribute)
        if weight is None:
            raise ShardtuneError(
                f"The model has no parameter {name} to store in FP8.",
                why=f"{owner_name} is a {type(owner).__name__} with: {', '.join(owner._parameters) or 'none'}.",
            )
        _check_block(name, weight, block)
        if isinstance(owner, nn.Linear) and attribute == "weight":
            owner.__class__ = Fp8Linear
        elif weight.dim() == 3:
            check_experts(owner)
            if not isinstance(owner, Fp8Experts):
                owner.__class__ = grouped_class(type(owner), Fp8Experts)  # type: ignore[arg-type]
        else:
            raise ShardtuneError(
                f"{name} cannot be stored in FP8.",
                why=f"It belongs to a {type(owner).__name__}, which is neither a linear layer nor fused experts.",
                fix="Keep it in the checkpoint's precision.",
            )
        _allocate_fp8(owner, attribute, weight, block)


def enable_fp8_compute(model: nn.Module) -> tuple[int, Counter[str]]:
    """Compute products of weights stored in FP8 in FP8, with activations rounded to it, where their scales allow.

    Returns:
        How many weights do, and for the others the reasons with their counts.
    """
    count, left = 0, Counter[str]()
    for module in model.modules():
        if not isinstance(module, Fp8Linear | Fp8Experts):
            continue
        reasons = {n: fp8_products.why_not(getattr(module, n).shape, block) for n, block in module.fp8_blocks.items()}
        module.fp8_compute_weights = frozenset(name for name, why in reasons.items() if why is None)
        count += len(module.fp8_compute_weights)
        left.update(why for why in reasons.values() if why is not None)
    return count, left


def fp8_candidates(model: nn.Module, excluded: Collection[str] = ()) -> list[str]:
    """Weights worth quantising: of every linear layer and all fused experts in the decoder layers, but no router.

    Args:
        model: A transformers model, which names its decoder layers' class.
        excluded: Names below a decoder layer that are none of them, such as the router `mlp.gate`. A linear layer
            beside the experts with no more outputs than there are experts is taken for a router (or for the shared
            expert's gate) without being named.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    names = []
    for layer_name, layer in model.named_modules():
        if type(layer).__name__ not in kinds:
            continue
        scores = set(excluded) | _score_experts(layer)
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and name not in scores:
                names.append(f"{layer_name}.{name}.weight")
            elif hasattr(module, "num_experts"):
                names += [f"{layer_name}.{name}.{p}" for p, w in module._parameters.items() if is_fused(w)]
    if not names:
        raise ShardtuneError(
            f"{type(model).__name__} has no linear layer or fused experts that could be stored in FP8.",
            why=f"Classes of its decoder layers: {', '.join(sorted(kinds)) or 'not known'}.",
            fix="Set model.base_precision: bf16.",
        )
    return names


def _owner(model: nn.Module, owner_name: str, name: str) -> nn.Module:
    try:
        return model.get_submodule(owner_name)
    except AttributeError as error:
        raise ShardtuneError(f"The model has no parameter {name} to store in FP8.", why=str(error)) from error


def _check_block(name: str, weight: Tensor, block: fp8.Block) -> None:
    if weight.dim() not in (2, 3) or min(block) < 1:
        raise ShardtuneError(
            f"{name} of shape {tuple(weight.shape)} cannot have one scale for {block[0]} × {block[1]} elements.",
            why="Blocks are cut from matrices, or from the matrix of each expert.",
            fix="Keep the parameter in the checkpoint's precision, or use a block of at least 1 × 1.",
        )


def _allocate_fp8(owner: nn.Module, attribute: str, weight: Tensor, block: fp8.Block) -> None:
    codes = torch.full(weight.shape, _NAN_CODE, dtype=torch.uint8, device=weight.device).view(fp8.CODES)
    # Never a scalar, whatever the checkpoint has: FSDP2 refuses parameters without dimensions.
    scale = torch.full(fp8.scale_shape(weight.shape, block), torch.nan, dtype=torch.float32, device=weight.device)
    setattr(owner, attribute, nn.Parameter(codes, requires_grad=False))
    owner.register_parameter(attribute + SCALE, nn.Parameter(scale, requires_grad=False))
    owner.fp8_blocks = {**getattr(owner, "fp8_blocks", {}), attribute: block}  # type: ignore[assignment]


def _score_experts(layer: nn.Module) -> set[str]:
    """Names of linear layers that stand beside fused experts and score them."""
    found = set()
    for name, block in layer.named_modules():
        counts = [w.shape[0] for child in block.children() for w in child._parameters.values() if is_fused(w)]
        for child_name, child in block.named_children():
            if counts and isinstance(child, nn.Linear) and child.out_features <= counts[0]:
                found.add(f"{name}.{child_name}".removeprefix("."))
    return found
