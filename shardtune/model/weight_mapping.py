"""Which checkpoint tensors make up each parameter? Complete, or refused by name before any weight is read."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from shardtune.errors import ShardtuneError, UserInputError
from shardtune.model.safetensors_headers import FLOAT8, StoredTensor
from shardtune.model.stored_names import SCALE, text_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLOATS = {"float64", "float32", "float16", "bfloat16", FLOAT8}
Block = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor and its position in its parameter.

    Args:
        start: Index of its first element in the parameter. A stored tensor with fewer dimensions than the parameter
            fills one index of each leading dimension (expert 3 of a stack of experts).
        scale: What its float8 codes are multiplied with, where it is quantised.
    """

    stored: StoredTensor
    start: tuple[int, ...]
    scale: StoredTensor | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """The range of the parameter's first dimension that it touches."""
        first = self.start[0] if self.start else 0
        whole = len(self.stored.shape) == len(self.start)
        return first, first + (self.stored.shape[0] if whole and self.stored.shape else 1)

    def block(self, declared: Block | None) -> Block:
        """Rows and columns of a weight that share one scale.

        `declared` (the checkpoint's `weight_block_size`) is used where the grid of scales fits it: with ragged edges
        the grid alone does not determine the block size.
        """
        assert self.scale is not None
        rows, columns = self.stored.shape[-2:]
        grid_rows, grid_columns = scale_grid(self)[-2:]
        if declared and (math.ceil(rows / declared[0]), math.ceil(columns / declared[1])) == (grid_rows, grid_columns):
            return declared
        if rows % grid_rows or columns % grid_columns:
            raise UserInputError(
                f"The scales of '{self.stored.name}' do not match its shape: scales {list(self.scale.shape)}, weight "
                f"{list(self.stored.shape)}.",
                why=f"weight_block_size is {list(declared) if declared else 'not given'} in config.json.",
                fix="Copy or download config.json and the weights together.",
            )
        return rows // grid_rows, columns // grid_columns


@dataclass(frozen=True)
class WeightMapping:
    """How a checkpoint becomes a model: the pieces of every parameter."""

    pieces: Mapping[str, tuple[Piece, ...]]
    left_out: tuple[StoredTensor, ...] = ()  # the wrapper's other parts
    unused_scales: int = 0  # of activations: nothing here quantises activations with them
    declared_block: Block | None = None
    same: Mapping[str, str] = field(default_factory=dict)  # tied parameter → the one that is read
    twins: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)  # tied parameters that are stored as well

    @property
    def bytes(self) -> int:
        """Bytes of the text model in the checkpoint."""
        stored = {piece.stored for pieces in self.pieces.values() for piece in pieces}
        stored |= {piece.scale for pieces in self.pieces.values() for piece in pieces if piece.scale is not None}
        return sum(tensor.nbytes for tensor in stored)

    @property
    def quantised(self) -> set[str]:
        """Parameters whose every piece is stored in float8."""
        return {name for name, pieces in self.pieces.items() if all(piece.scale is not None for piece in pieces)}

    def block(self, name: str) -> Block:
        """The one block size of a quantised parameter.

        Raises:
            UserInputError: its pieces are cut differently, so that no one grid of scales describes it.
        """
        blocks = {piece.block(self.declared_block) for piece in self.pieces[name]}
        block = next(iter(blocks))
        starts = {piece.start[-2] % block[0] for piece in self.pieces[name]} if len(self.pieces[name]) > 1 else {0}
        if len(blocks) > 1 or starts != {0}:
            raise UserInputError(
                f"'{name}' cannot stay in float8: its parts have different block sizes ({sorted(blocks)}).",
                fix="Set model.base_precision: bf16 to dequantise while loading.",
            )
        return block


def map_weights(
    model: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    *,
    prefixes: Mapping[str, str] | None = None,
    ignore: Collection[str] = (),
    declared_block: Block | None = None,
) -> WeightMapping:
    """Map the checkpoint tensors `stored` to the parameters of `model` (which may be on the meta device).

    Args:
        prefixes: For a text model inside a wrapper: stored prefix → the text model's. Other names are skipped.
        ignore: Regular expressions of stored names that are not read (`model.ignore_tensors`).
        declared_block: `weight_block_size` of the checkpoint's quantization_config.

    Raises:
        UserInputError: a parameter has no stored tensor, a stored tensor no parameter, or one does not fit.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    text = text_tensors(stored, prefixes, ignore, wanted)
    weights, scales = text.weights, text.scales
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    whole: dict[str, list[Piece]] = defaultdict(list)
    grouped: dict[str, list[tuple[str, str]]] = defaultdict(list)  # target → (source pattern, name)
    for name in sorted(weights, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if pattern is None:
            tensor = weights[name]
            whole[target].append(Piece(tensor, (0,) * max(1, len(tensor.shape)), scales.pop(name, None)))
        else:
            grouped[target].append((pattern, name))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for target, sources in grouped.items():
        whole[target].extend(_stacked(model, by_pattern[sources[0][0]], sources, weights, scales))
    same = tied_parameters(model)
    pieces = _without_twins(whole, same)
    _refuse_bad_fit(model, pieces, wanted, same, sorted(scales))
    return WeightMapping(
        {name: tuple(found) for name, found in pieces.items() if name in wanted},
        text.left_out,
        text.unused_scales,
        declared_block,
        same,
        {name: tuple(whole[name]) for name, kept in same.items() if name in whole and kept in whole},
    )


def scale_grid(piece: Piece) -> tuple[int, ...]:
    """The shape of a piece's scales as a grid over its weight: (…, rows, columns), whatever shape they are stored in.

    Checkpoints store one scale per tensor as a scalar, [1] or [1, 1], per expert as [experts] or [experts, 1, 1].
    """
    assert piece.scale is not None
    shape, lead = piece.scale.shape, piece.stored.shape[:-2]
    if math.prod(shape) == 1:
        return (1,) * len(lead) + (1, 1)
    if lead and shape == lead:
        return (*lead, 1, 1)
    if len(shape) == len(piece.stored.shape) and shape[: len(lead)] in (lead, (1,) * len(lead)):
        return shape
    if not lead and len(shape) == 1 and shape[0] == piece.stored.shape[0]:
        return (shape[0], 1)  # one per row
    raise UserInputError(
        f"The scales of '{piece.stored.name}' do not match its shape: scales {list(shape)}, weight "
        f"{list(piece.stored.shape)}.",
        fix="Copy or download the checkpoint again, or use one in bf16.",
    )


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Names of tied parameters, and the name each is stored under."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _stacked(
    model: PreTrainedModel,
    converter: WeightConverter,
    sources: list[tuple[str, str]],
    weights: Mapping[str, StoredTensor],
    scales: dict[str, StoredTensor],
) -> list[Piece]:
    """Pieces of a stack of experts, gate and up above each other: what the released mixtures of experts need."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if kinds not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        words = ", ".join(kind.__name__ for kind, _ in kinds)
        raise ShardtuneError(
            f"{type(model).__name__} rearranges '{sources[0][1]}' while loading ({words}), which is not supported.",
            why="Each rank reads only its own rows, so a rearrangement has to be defined row by row.",
            fix="Load and save the model once with transformers (save_original_format=False writes the model's own "
            "names), and use that folder.",
        )
    pieces, offset = [], 0
    for pattern in converter.source_patterns:
        members = [name for found, name in sources if found == pattern]
        if not members:
            return []  # reported as a missing parameter
        for expert, name in enumerate(members):  # sorted by number, as transformers stacks them
            start = (expert, offset) + (0,) * (len(weights[name].shape) - 1)
            pieces.append(Piece(weights[name], start, scales.pop(name, None)))
        offset += weights[members[0]].shape[0]
    return pieces


def _without_twins(whole: Mapping[str, list[Piece]], same: Mapping[str, str]) -> dict[str, list[Piece]]:
    """A tied parameter is read once, from whichever of its names is stored."""
    pieces = {name: found for name, found in whole.items() if name not in same}
    for name, kept in same.items():
        if kept not in pieces and name in whole:
            pieces[kept] = whole[name]
    return pieces


def _refuse_bad_fit(
    model: PreTrainedModel,
    pieces: Mapping[str, list[Piece]],
    wanted: Mapping[str, tuple[int, ...]],
    same: Mapping[str, str],
    lost_scales: list[str],
) -> None:
    name = type(model).__name__
    have = set(pieces) | set(same)
    harmless = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]  # as transformers has it
    unexpected = sorted(
        target for target in have - set(wanted) if not any(re.search(pattern, target) for pattern in harmless)
    )
    missing = sorted(set(wanted) - have)
    if missing:
        raise UserInputError(
            f"{len(missing)} parameters of {name} are missing from the checkpoint: {_some(missing)}.",
            why=f"The checkpoint has {_some(unexpected)} instead." if unexpected else "",
            fix="Set model.model_name_or_path to a checkpoint whose weights match its config.json.",
        )
    misfits = [
        f"{target} ({_covered(found)} in the checkpoint, {list(wanted[target])} in the model)"
        for target, found in pieces.items()
        if target in wanted and not _covers(found, wanted[target])
    ]
    if misfits:
        raise UserInputError(
            f"{len(misfits)} tensors of the checkpoint do not have the shape {name} needs: {_some(sorted(misfits))}.",
            why="config.json is from a different model size.",
            fix="Copy or download config.json and the weights together.",
        )
    if unexpected:
        raise UserInputError(
            f"{len(unexpected)} tensors of the checkpoint match no parameter of {name}: {_some(unexpected)}.",
            why="They would silently be missing from the trained model.",
            fix="If intended, list them in model.ignore_tensors (regular expressions); otherwise check config.json.",
        )
    if lost_scales:
        raise UserInputError(
            f"{len(lost_scales)} scales have no quantised tensor, for example that of {lost_scales[0]}.",
            fix="Copy or download the checkpoint again.",
        )
    _refuse_dtypes(pieces)


def _refuse_dtypes(pieces: Mapping[str, list[Piece]]) -> None:
    for target, found in pieces.items():
        for piece in found:
            tensor = piece.stored
            if tensor.dtype == FLOAT8 and piece.scale is None:
                raise UserInputError(
                    f"'{tensor.name}' is stored in float8 without a scale ('{tensor.name}{SCALE}' is missing).",
                    why="Without the scale its values are unknown.",
                    fix="Copy or download the checkpoint again, or use one in bf16.",
                )
            if tensor.dtype not in _FLOATS or (piece.scale is not None and tensor.dtype != FLOAT8):
                scaled = " with a scale" if piece.scale is not None else ""
                raise UserInputError(
                    f"'{tensor.name}' is stored as {tensor.dtype}{scaled}; '{target}' cannot be read from that.",
                    why="Supported are float32, float16, bfloat16, and float8_e4m3fn with scales.",
                    fix="Use the unquantised checkpoint of the model, or its FP8 one.",
                )


def _covers(pieces: list[Piece], shape: tuple[int, ...]) -> bool:
    """Whether the pieces fill the parameter exactly: they lie inside, apart, and add up."""
    if sum(math.prod(piece.stored.shape) for piece in pieces) != math.prod(shape):
        return False
    if len(pieces) == 1:
        return pieces[0].stored.shape == shape
    ends = [
        [start + size for start, size in zip(piece.start, _padded(piece.stored.shape, len(shape)), strict=True)]
        for piece in pieces
    ]
    inside = all(end <= size for piece_ends in ends for end, size in zip(piece_ends, shape, strict=True))
    return inside and len({piece.start for piece in pieces}) == len(pieces)


def _padded(shape: tuple[int, ...], dimensions: int) -> tuple[int, ...]:
    return (1,) * (dimensions - len(shape)) + shape


def _covered(pieces: list[Piece]) -> str:
    return str(list(pieces[0].stored.shape)) if len(pieces) == 1 else f"{len(pieces)} × {list(pieces[0].stored.shape)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
