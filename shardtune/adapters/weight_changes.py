"""What does an adapter make of each parameter of the base? One change per parameter, applied to its float32 values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils import get_peft_model_state_dict
from torch import Tensor

from shardtune.errors import UserInputError
from shardtune.model.weight_loading import is_adapter, unwrapped_name

if TYPE_CHECKING:
    from peft import PeftModel

_ADAPTER = "default"


class WeightChange(Protocol):
    def apply(self, weight: Tensor) -> Tensor:
        """The parameter's new values, from its old ones in float32."""

    def apply_rows(self, weight: Tensor, first: int, expert: int | None = None) -> Tensor:
        """The same for some rows, so that nothing of the parameter's size is needed.

        Args:
            weight: Rows `first`, `first + 1`, ... of the parameter, or of the matrix of one expert.
            expert: Of a parameter with three dimensions, the index of the first.
        """


@dataclass(frozen=True)
class LowRank:
    """weight + scale * B A.

    Attributes:
        a, b: (r, in) and (out, r); of fused experts (experts, r, in) and (experts, out, r).
        transposed: The parameter is stored as (…, in, out).
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False

    def delta(self) -> Tensor:
        """What is added, in the parameter's own layout and float32."""
        product: Tensor = (self.b.float() @ self.a.float()) * self.scale
        return product.transpose(-2, -1) if self.transposed else product

    def apply(self, weight: Tensor) -> Tensor:
        return weight + self.delta()

    def apply_rows(self, weight: Tensor, first: int, expert: int | None = None) -> Tensor:
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        left, right = (a.T, b.T) if self.transposed else (b, a)
        return weight.addmm(left[first : first + len(weight)].float(), right.float(), alpha=self.scale)


@dataclass(frozen=True)
class Dora:
    """The low-rank sum, each row scaled to the length in `magnitude`."""

    low_rank: LowRank
    magnitude: Tensor

    def apply(self, weight: Tensor) -> Tensor:
        return self._scaled(self.low_rank.apply(weight), self.magnitude)

    def apply_rows(self, weight: Tensor, first: int, expert: int | None = None) -> Tensor:
        moved = self.low_rank.apply_rows(weight, first, expert)
        return self._scaled(moved, self.magnitude[first : first + len(weight)])

    @staticmethod
    def _scaled(moved: Tensor, magnitude: Tensor) -> Tensor:
        length: Tensor = moved.norm(dim=1)
        return moved * (magnitude.float() / length).unsqueeze(1)


@dataclass(frozen=True)
class Replaced:
    """What trained in full: modules_to_save, biases."""

    value: Tensor

    def apply(self, weight: Tensor) -> Tensor:
        return self.value.float()

    def apply_rows(self, weight: Tensor, first: int, expert: int | None = None) -> Tensor:
        own = self.value if expert is None else self.value[expert]
        return own[first : first + len(weight)].float()


@dataclass(frozen=True)
class Rows:
    """Some rows are replaced, those of new tokens; there may be more of them than the base has."""

    ids: tuple[int, ...]
    values: Tensor

    def apply(self, weight: Tensor) -> Tensor:
        count = max(len(weight), max(self.ids) + 1)
        grown = torch.zeros(count, weight.shape[1])
        grown[: len(weight)] = weight
        grown[list(self.ids)] = self.values.float()
        return grown

    def apply_rows(self, weight: Tensor, first: int, expert: int | None = None) -> Tensor:
        """`weight` has rows of zeros where the parameter grows."""
        here = [place for place, row in enumerate(self.ids) if first <= row < first + len(weight)]
        changed = weight.clone()
        changed[[self.ids[place] - first for place in here]] = self.values[here].float()
        return changed


def weight_changes(model: PeftModel, tensors: Mapping[str, Tensor]) -> dict[str, WeightChange]:
    """What each tensor of an adapter changes, by the base parameter's name as transformers has it.

    Args:
        model: The base with the adapter's layers, which may be on the meta device. Its trainable parameters are those
            of `tensors` (checkpoint/adapter.py compares them).
        tensors: By PEFT's names on disk.

    Raises:
        UserInputError: a kind of LoRA whose weights are not known to be `W + scale * B A` or DoRA.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    on_disk = get_peft_model_state_dict(model, state_dict=trainable, save_embedding_layers=False)
    values = {id(parameter): tensors[name] for name, parameter in on_disk.items()}
    changes: dict[str, WeightChange] = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            changes[f"{unwrapped_name(name)}.{module.parameter_name}"] = _of_parameter(module, values)
        elif isinstance(module, LoraLayer):
            changes[f"{unwrapped_name(name)}.weight"] = _of_linear(name, module, values)
        elif isinstance(module, TrainableTokensLayer):
            rows = values.get(id(module.trainable_tokens_delta[_ADAPTER]))
            if rows is not None and module.tied_adapter is None:  # a tied head has the embedding's
                changes[f"{unwrapped_name(name)}.weight"] = Rows(tuple(module.token_indices[_ADAPTER]), rows)
    for name, parameter in trainable.items():
        if not is_adapter(name):
            changes[unwrapped_name(name)] = Replaced(values[id(parameter)])
    return changes


def _of_linear(name: str, layer: LoraLayer, values: Mapping[int, Tensor]) -> WeightChange:
    variant = type(layer.lora_variant[_ADAPTER]).__name__ if _ADAPTER in layer.lora_variant else None
    if variant not in (None, "DoraLinearVariant") or _ADAPTER not in layer.lora_A or layer.lora_bias[_ADAPTER]:
        raise UserInputError(
            f"The adapter on '{unwrapped_name(name)}' is of a kind that cannot be merged here.",
            why=variant
            or ("LoRA with a bias" if _ADAPTER in layer.lora_A else "LoRA on an embedding or a convolution"),
            fix="Supported are LoRA (rsLoRA too) and DoRA on linear layers, LoRA on experts, modules_to_save and new "
            "tokens. PEFT's merge_and_unload may know the others.",
        )
    low_rank = LowRank(
        values[id(layer.lora_A[_ADAPTER].weight)],
        values[id(layer.lora_B[_ADAPTER].weight)],
        layer.scaling[_ADAPTER],
        transposed=bool(getattr(layer, "fan_in_fan_out", False)),
    )
    if variant is None:
        return low_rank
    return Dora(low_rank, values[id(layer.lora_magnitude_vector[_ADAPTER].weight)])


def _of_parameter(wrapper: ParamWrapper, values: Mapping[int, Tensor]) -> LowRank:
    a, b = values[id(wrapper.lora_A[_ADAPTER].weight)], values[id(wrapper.lora_B[_ADAPTER].weight)]
    if wrapper._param_ndim == 3:
        # PEFT keeps A as (E * r, in), expert after expert, and B as (out, r * E), with the experts innermost.
        experts = wrapper.num_experts
        a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    return LowRank(
        a,
        b,
        wrapper.scaling[_ADAPTER],
        transposed=wrapper._param_ndim == 3 and not wrapper._did_swap_in_out_features,
    )
