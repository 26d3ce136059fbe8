"""Which tensors does a GGUF file of a merged model hold? Named and ordered as llama.cpp has them, read row by row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import gguf
import torch
from torch import Tensor

from shardtune.adapters.weight_changes import LowRank
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.export.gguf_file import GgufTensor, Type, rounded, type_of
from shardtune.export.gguf_models import GgufModel, experts_of, is_permuted, one_expert, rope_factors
from shardtune.export.merged_tensors import MergedTensor, MergedTensors
from shardtune.export.survival import Survival

_ROWS_AT_ONCE = 1 << 22  # values: 16 MB in float32
_NO_WEIGHT = "rotary_emb.inv_freq"  # computed from the settings


@dataclass
class GgufTensors:
    """The plan of a file's tensors.

    Attributes:
        merged: In float32.
        parameters: Which parameter of the base each tensor is (a part of).
        survival: By parameter, filled while tensors are read: how much of the adapter's change is in the difference
            between the written tuned model and the base written in the same type.
    """

    merged: MergedTensors
    model: GgufModel
    main: gguf.GGMLQuantizationType
    tensors: list[GgufTensor] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    survival: dict[str, Survival] = field(default_factory=dict)


def plan_tensors(merged: MergedTensors, model: GgufModel, main: gguf.GGMLQuantizationType) -> GgufTensors:
    """Raises:
    UserInputError: a tensor has no place in the file.
    """
    plan = GgufTensors(merged, model, main)
    config = merged.adapted.meta_model.model.config
    names = gguf.get_tensor_name_map(_arch(model.arch), config.num_hidden_layers)
    by_parameter: dict[str, list[MergedTensor]] = defaultdict(list)
    for tensor in merged.tensors:
        if tensor.parameter is not None:
            by_parameter[tensor.parameter].append(tensor)
        elif tensor.text_name is not None and not tensor.text_name.endswith(_NO_WEIGHT):
            raise UserInputError(
                f"--to gguf: '{tensor.name}' of the base is no parameter of the model.",
                fix="List it in model.ignore_tensors if it is not needed.",
            )
    for parameter, stored in by_parameter.items():
        experts = experts_of(parameter)
        if experts is not None:
            for kind in experts[1]:
                name, shape = f"blk.{experts[0]}.ffn_{kind}_exps.weight", _expert_shape(plan, parameter)
                _add(plan, name, parameter, shape, _expert_blocks(plan, parameter, stored, kind))
            continue
        found = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        stored = [tensor for tensor in stored if tensor.text_name == parameter] or stored  # not a tied head's copy
        if found is None or len(stored) != 1:
            raise UserInputError(
                f"--to gguf: llama.cpp's {model.arch} has no tensor for '{parameter}'.",
                fix="Export merged weights: --to merged.",
            )
        shape = stored[0].shape
        if found.endswith("ffn_gate_inp_shexp.weight"):
            shape = shape[-1:]
        blocks = _blocks(plan, parameter, stored[0], shape, type_of(found, shape, main))
        _add(plan, found, parameter, shape, blocks)
    factors = rope_factors(config)
    if factors is not None:
        plan.tensors.append(
            GgufTensor("rope_freqs.weight", (len(factors),), Type.F32, lambda: iter([torch.tensor(factors)]))
        )
    return plan


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k with the halves of each head interleaved: the pairs that llama.cpp turns lie side by side."""
    width = rows.shape[0] // heads
    return rows.view(heads, 2, width // 2, -1).transpose(1, 2).reshape(rows.shape)


def _add(
    plan: GgufTensors, name: str, parameter: str, shape: tuple[int, ...], blocks: Callable[[], Iterator[Tensor]]
) -> None:
    plan.parameters[name] = parameter
    plan.tensors.append(GgufTensor(name, shape, type_of(name, shape, plan.main), blocks))


def _blocks(
    plan: GgufTensors,
    parameter: str,
    stored: MergedTensor,
    shape: tuple[int, ...],
    kind: gguf.GGMLQuantizationType,
) -> Callable[[], Iterator[Tensor]]:
    config = plan.merged.adapted.meta_model.model.config
    letter = is_permuted(parameter, plan.model)
    heads = config.num_attention_heads if letter == "q" else config.num_key_value_heads

    def blocks() -> Iterator[Tensor]:
        first, pending = 0, []
        for rows in _rows(stored):
            _measure(plan, parameter, kind, rows, first)
            first += len(rows)
            if letter is None:
                yield rows.view(-1) if len(shape) == 1 else rows
            else:
                pending.append(rows)
        if letter is not None:
            yield permuted(torch.cat(pending).view(shape), heads)

    return blocks


def _expert_shape(plan: GgufTensors, parameter: str) -> tuple[int, ...]:
    model = plan.merged.adapted.model
    experts, out, width = next(
        tuple(p.shape) for name, p in model.named_parameters() if _parameter_name(name) == parameter
    )
    return (experts, out // 2, width) if parameter.endswith("gate_up_proj") else (experts, out, width)


def _parameter_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _expert_blocks(
    plan: GgufTensors, parameter: str, stored: list[MergedTensor], kind: str
) -> Callable[[], Iterator[Tensor]]:
    count, height, _ = _expert_shape(plan, parameter)
    start = height if kind == "up" else 0
    written = type_of(f"ffn_{kind}_exps", _expert_shape(plan, parameter), plan.main)

    def blocks() -> Iterator[Tensor]:
        singles = {one_expert(tensor.name): tensor for tensor in stored}
        if None not in singles:
            for expert in range(count):
                whole = torch.cat(list(_rows(singles[expert, kind])))
                _measure(plan, parameter, written, whole, start, expert)
                yield whole
            return
        if len(stored) != 1:
            raise ShardtuneError(f"{parameter} is stored in {len(stored)} tensors.", fix="Please report this.")
        rows_each = stored[0].shape[-2]
        for expert, whole in enumerate(_matrices(stored[0], rows_each)):
            part = whole[start : start + height]
            _measure(plan, parameter, written, part, start, expert)
            yield part

    return blocks


def _matrices(stored: MergedTensor, rows_each: int) -> Iterator[Tensor]:
    pending: list[Tensor] = []
    count = 0
    for rows in _rows(stored):
        while len(rows):
            taken, rows = rows[: rows_each - count], rows[rows_each - count :]
            pending.append(taken)
            count += len(taken)
            if count == rows_each:
                yield torch.cat(pending)
                pending, count = [], 0


def _rows(stored: MergedTensor) -> Iterator[Tensor]:
    """Its content as whole rows of float32; of a vector as one row."""
    width = stored.shape[-1]
    left = torch.empty(0)
    for chunk in stored.chunks():
        values = chunk.contiguous().view(-1)
        if values.dtype == torch.uint8:
            values = values.view(stored.torch_dtype)
        values = torch.cat([left, values.float()]) if len(left) else values.float()
        whole = len(values) // width * width
        yield from values[:whole].view(-1, width).split(max(1, _ROWS_AT_ONCE // width))
        left = values[whole:]
    if len(left):
        raise ShardtuneError(f"'{stored.name}' ends within a row.", fix="Copy or download the base model again.")


def _measure(
    plan: GgufTensors,
    parameter: str,
    kind: gguf.GGMLQuantizationType,
    rows: Tensor,
    first: int,
    expert: int | None = None,
) -> None:
    """Compare what the written values of tuned model and base differ by with what the adapter adds."""
    change = plan.merged.changes.get(parameter)
    if not isinstance(change, LowRank):  # what replaces a weight or rescales it leaves none of the base's rounding
        return
    delta = change.apply_rows(torch.zeros_like(rows), first, expert)
    old = rows - delta
    moved = rounded(rows.contiguous(), kind) - rounded(old, kind)
    plan.survival.setdefault(parameter, Survival()).add(old, rows, old + moved)


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
