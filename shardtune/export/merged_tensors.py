"""Which tensors does the merged checkpoint consist of? The base's, under its names, computed a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardtune.adapters.weight_changes import Replaced, WeightChange, weight_changes
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.export.fp8_rounding import BlockScales
from shardtune.export.survival import Survival
from shardtune.inference.load import MetaAdapter, build_adapted
from shardtune.kernels import fp8
from shardtune.model.safetensors_headers import FLOAT8, StoredTensor, read_headers
from shardtune.model.shard_reader import ShardReader
from shardtune.model.stored_names import SCALE, is_activation_scale
from shardtune.model.weight_loading import is_adapter, unwrapped_name
from shardtune.model.weight_mapping import Piece, WeightMapping

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.inference.source import TunedModel

_AT_ONCE = 1 << 21  # elements: 8 MB in float32, of which a dozen exist at a time
_COPY_BYTES = 16 << 20
_NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class MergedTensor:
    """One tensor of the merged checkpoint.

    Attributes:
        name: As the base stores it.
        dtype: torch's name of it.
        chunks: Its content, in order, as flat or 2-D pieces of its dtype (of any dtype's bytes where it is copied).
            Each call reads it anew.
        text_name: The name without a wrapper's prefix; None for what is no part of the text model.
        parameter: Of the text model as transformers has it; a stack of experts may be stored as many tensors.
        changed: Does the adapter change it?
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Tensor]]
    text_name: str | None = None
    parameter: str | None = None
    changed: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def whole(self) -> Tensor:
        """All of it at once."""
        parts = [chunk.contiguous().view(-1).view(torch.uint8) for chunk in self.chunks()]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return flat.view(self.torch_dtype).reshape(self.shape)


@dataclass(frozen=True)
class MergedTensors:
    """The merged checkpoint's tensors, in the order of the base's. Their chunks are read inside of a `with` block.

    Attributes:
        survival: By parameter; filled while `chunks` of changed tensors are read.
        untied: The head is stored by itself now, where the base's is its embedding.
        dtype: What the weights are written in, where that is not as they are stored.
        rows: Of the embedding, where it has grown.
        dequantised: The base is stored in float8, this is not.
    """

    adapted: MetaAdapter
    changes: Mapping[str, WeightChange]
    tensors: tuple[MergedTensor, ...]
    survival: Mapping[str, Survival]
    untied: bool
    dtype: str | None
    rows: int | None
    dequantised: bool
    reader: ShardReader

    def __enter__(self) -> MergedTensors:
        self.reader.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.reader.__exit__(*error)


def plan_merge(tuned: TunedModel, dtype: str | None = None, *, fp8_layout: bool = False) -> MergedTensors:
    """The base with the adapter in it; nothing is computed before its chunks are read.

    Args:
        dtype: torch's name of what the text model's weights become; None: as stored, and bfloat16 for float8.
        fp8_layout: Keep what is stored in float8 so, in the same blocks.

    Raises:
        UserInputError: the adapter does not fit the base, or is of a kind that cannot be merged.
    """
    adapted = build_adapted(tuned, fp8=False)
    changes = weight_changes(adapted.model, adapted.tensors)
    return _Merge(adapted, changes, ShardReader(adapted.meta_model.mapping), dtype, fp8_layout).result()


@dataclass
class _Merge:
    """Decides for every stored tensor what becomes of it."""

    adapted: MetaAdapter
    changes: Mapping[str, WeightChange]
    reader: ShardReader
    dtype: str | None
    fp8_layout: bool
    survival: dict[str, Survival] = field(default_factory=dict)

    def result(self) -> MergedTensors:
        stored = read_headers(self.adapted.folder)
        mapping, model = self.mapping, self.adapted.model
        if self.fp8_layout and not mapping.quantised:
            raise UserInputError(
                "--dtype fp8: the base model is not stored in FP8.",
                why="Merged weights are rounded to the base's own FP8 layout; nothing is quantised anew.",
                fix="Leave --dtype out, and quantise the merged model with a tool of your server.",
            )
        self.shapes = {unwrapped_name(n): tuple(p.shape) for n, p in model.named_parameters() if not is_adapter(n)}
        self.kept_float32 = tuple(self.adapted.meta_model.model._get_dtype_plan(torch.bfloat16))
        self.main_float32 = main_dtype(stored) == "float32"
        untied = [name for name, kept in mapping.same.items() if self._is_untied(model, name, kept)]
        places = {piece.stored.name: (name, piece) for name, pieces in mapping.pieces.items() for piece in pieces}
        for name, pieces in mapping.twins.items():
            owner = name if name in untied else mapping.same[name]
            places |= {piece.stored.name: (owner, piece) for piece in pieces}
        scales = {piece.scale.name for _, piece in places.values() if piece.scale is not None}
        tensors = [tensor for one in stored.values() for tensor in self._convert(one, stored, places, scales)]
        for name in untied:
            if name not in mapping.twins:
                tensors += self._untied_head(name, mapping.same[name])
        known = {tensor.parameter for tensor in tensors}
        lost = sorted(set(self.changes) - known)
        if lost:
            raise ShardtuneError(
                f"The adapter changes {lost[0]}, which is in no file of the base model.", fix="Please report this."
            )
        embedding = self.adapted.meta_model.model.get_input_embeddings().weight
        grown = len(embedding) if len(embedding) > self.adapted.stored_rows else None  # type: ignore[arg-type]
        written = self.dtype or ("bfloat16" if mapping.quantised and not self.fp8_layout else None)
        return MergedTensors(
            adapted=self.adapted,
            changes=self.changes,
            tensors=tuple(tensors),
            survival=self.survival,
            untied=bool(untied),
            dtype=written,
            rows=grown,
            dequantised=bool(mapping.quantised) and not self.fp8_layout,
            reader=self.reader,
        )

    @property
    def mapping(self) -> WeightMapping:
        return self.adapted.meta_model.mapping

    def _is_untied(self, model: PeftModel, name: str, kept: str) -> bool:
        """Does one of two tied parameters change without the other?"""
        if name in self.changes:
            return True
        change = self.changes.get(kept)
        if not isinstance(change, Replaced):  # rows of new tokens: PEFT gives a tied head the embedding's
            return False
        every = model.named_parameters(remove_duplicate=False)
        trained = [(unwrapped_name(n), id(p)) for n, p in every if p.requires_grad]
        shared = {number for found, number in trained if found == kept}
        return not any(found == name and number in shared for found, number in trained)

    def _convert(
        self,
        stored: StoredTensor,
        all_stored: Mapping[str, StoredTensor],
        places: Mapping[str, tuple[str, Piece]],
        scales: set[str],
    ) -> list[MergedTensor]:
        if stored.name in places:
            name, piece = places[stored.name]
            return self._of_parameter(stored.name, name, piece)
        if stored.name in scales:  # written with their weights, or not needed any more
            return []
        dequantised = bool(self.mapping.quantised) and not self.fp8_layout
        if dequantised and is_activation_scale(stored.name):
            return []
        if dequantised and stored.name.endswith(SCALE) and stored.name.removesuffix(SCALE) in all_stored:
            return []
        scale = all_stored.get(stored.name + SCALE)
        if dequantised and stored.dtype == FLOAT8 and scale is not None:  # of the vision part
            piece = Piece(stored, (0,) * len(stored.shape), scale)
            return [self._computed(stored.name, None, piece, None, self.dtype or "bfloat16", stored.shape)]
        return [self._copied(stored)]

    def _of_parameter(self, stored_name: str, name: str, piece: Piece) -> list[MergedTensor]:
        stored, change = piece.stored, self.changes.get(name)
        shape = stored.shape
        grown = self.shapes[name][:1] if name in self.shapes else ()
        if len(self.mapping.pieces.get(name, ())) == 1 and grown and shape and grown[0] > shape[0]:
            if len(shape) != 2:
                raise UserInputError(
                    f"{name} would have to grow from {shape[0]} to {grown[0]} rows for new tokens.",
                    why="Only embeddings and heads without a bias can grow.",
                )
            shape = (grown[0], *shape[1:])
        dtype = self._dtype(name, piece)
        if change is not None and piece.scale is not None and self.fp8_layout:
            return self._requantised(name, piece, change)
        if change is None and shape == stored.shape and dtype == stored.dtype:
            scale = [self._copied(piece.scale)] if piece.scale is not None else []
            return [self._copied(stored, name), *scale]
        return [self._computed(stored_name, name, piece, change, dtype, shape)]

    def _dtype(self, name: str, piece: Piece) -> str:
        stored = piece.stored.dtype
        if piece.scale is not None:
            return FLOAT8 if self.fp8_layout else self.dtype or "bfloat16"
        if self.dtype is None or any(pattern in name for pattern in self.kept_float32):
            return stored
        return self.dtype if stored in _NARROW or self.main_float32 else stored

    def _untied_head(self, name: str, kept: str) -> list[MergedTensor]:
        pieces = self.mapping.pieces[kept]
        assert len(pieces) == 1, "an embedding is stored whole"
        stored_name = self._stored_name(name, kept, pieces[0].stored.name)
        found = self._of_parameter(stored_name, name, pieces[0])
        return [MergedTensor(**{**vars(found[0]), "name": stored_name})]

    def _stored_name(self, name: str, kept: str, kept_stored: str) -> str:
        """What the base would call a parameter that it does not store, from its name for another."""
        wrapper = self.adapted.meta_model.wrapper
        if wrapper is None:
            return name
        pairs = list(wrapper.stored.items())
        styles = [stored for stored, text in pairs if kept.startswith(text)]
        style = next(i for i, stored in enumerate(styles) if kept_stored.startswith(stored))
        heads = [(stored, text) for stored, text in pairs if name.startswith(text)]
        stored, text = heads[min(style, len(heads) - 1)]
        return stored + name.removeprefix(text)

    def _text_name(self, stored_name: str) -> str | None:
        wrapper = self.adapted.meta_model.wrapper
        if wrapper is None:
            return stored_name
        for prefix, text in wrapper.stored.items():
            if stored_name.startswith(prefix):
                return text + stored_name.removeprefix(prefix)
        return None

    def _copied(self, stored: StoredTensor, parameter: str | None = None) -> MergedTensor:
        def chunks() -> Iterator[Tensor]:
            yield from self.reader.pieces(stored, _COPY_BYTES)

        text = self._text_name(stored.name)
        return MergedTensor(stored.name, stored.dtype, stored.shape, chunks, text, parameter)

    def _computed(
        self,
        stored_name: str,
        name: str | None,
        piece: Piece,
        change: WeightChange | None,
        dtype: str,
        shape: tuple[int, ...],
    ) -> MergedTensor:
        target: torch.dtype = getattr(torch, dtype)

        def chunks() -> Iterator[Tensor]:
            for stretch in _row_ranges(shape):
                old, new = self._values(piece, change, stretch)
                written = new.to(target)
                if change is not None:
                    _refuse_not_finite(written, str(name), dtype)
                    assert name is not None
                    self.survival.setdefault(name, Survival()).add(old, new, written.float())
                yield written

        return MergedTensor(
            stored_name, dtype, shape, chunks, self._text_name(stored_name), name, changed=change is not None
        )

    def _requantised(self, name: str, piece: Piece, change: WeightChange) -> list[MergedTensor]:
        """Codes and scales of a changed tensor in the base's FP8 layout."""
        stored, scale = piece.stored, piece.scale
        assert scale is not None
        known: list[BlockScales] = []

        def scales() -> BlockScales:
            if not known:  # all values are needed before the first code
                grid = self.reader.grid(piece)
                block = piece.block(self.mapping.declared_block)
                found = BlockScales(grid.reshape(-1, *grid.shape[-2:]), block, scale.torch_dtype)
                for stretch in _row_ranges(stored.shape):
                    found.measure(self._values(piece, change, stretch)[1], *stretch[:2])
                known.append(found)
            return known[0]

        def codes() -> Iterator[Tensor]:
            for stretch in _row_ranges(stored.shape):
                old, new = self._values(piece, change, stretch)
                _refuse_not_finite(new, name, "float32")
                written, values = scales().quantize(new, *stretch[:2])
                self.survival.setdefault(name, Survival()).add(old, new, values)
                yield written

        def written_scales() -> Iterator[Tensor]:
            yield scales().new.to(scale.torch_dtype)

        own, beside = self._text_name(stored.name), self._text_name(scale.name)
        return [
            MergedTensor(stored.name, stored.dtype, stored.shape, codes, own, name, changed=True),
            MergedTensor(scale.name, scale.dtype, scale.shape, written_scales, beside, name, changed=True),
        ]

    def _values(self, piece: Piece, change: WeightChange | None, stretch: _RowRange) -> tuple[Tensor, Tensor]:
        """Old and new values of some rows of a stored tensor, in float32."""
        matrix, first, end = stretch
        old = self._old(piece, matrix, first, end)
        if change is None:
            return old, old
        if len(piece.stored.shape) < 2:
            return old, change.apply_rows(old.view(-1), 0).view(old.shape)
        start = piece.start
        if len(start) > 3:
            raise UserInputError(f"{piece.stored.name} has {len(start)} dimensions: a change of it cannot be merged.")
        if len(start) == 3:  # of experts: all of them, or one of its own tensor
            return old, change.apply_rows(old, first + start[1], start[0] + matrix)
        return old, change.apply_rows(old, first + start[0])

    def _old(self, piece: Piece, matrix: int, first: int, end: int) -> Tensor:
        stored = piece.stored
        height = stored.shape[-2] if len(stored.shape) >= 2 else 1
        there = min(end, height)  # an embedding that grows has rows behind those
        rows = self.reader.rows(stored, matrix * height + first, matrix * height + max(first, there))
        if piece.scale is not None:
            grid = self.reader.grid(piece)
            grid = grid.reshape(-1, *grid.shape[-2:])
            scale = grid[matrix if len(grid) > 1 else 0]
            return fp8.dequantize_rows(rows, scale, piece.block(self.mapping.declared_block), first, torch.float32)
        values = rows.float()
        if there < end:
            missing = torch.zeros(end - max(first, there), values.shape[1])
            values = torch.cat([values, missing])
        return values


_RowRange = tuple[int, int, int]


def _row_ranges(shape: tuple[int, ...]) -> Iterator[_RowRange]:
    """(matrix, first row, end) of pieces of a tensor that are small enough to be held several times."""
    if len(shape) < 2:
        yield 0, 0, 1
        return
    rows, columns = shape[-2:]
    step = max(1, _AT_ONCE // max(1, columns))
    for matrix in range(math.prod(shape[:-2])):
        for first in range(0, rows, step):
            yield matrix, first, min(first + step, rows)


def main_dtype(stored: Mapping[str, StoredTensor]) -> str:
    """What most of the bytes of a checkpoint are, as torch calls it."""
    sizes: dict[str, int] = {}
    for tensor in stored.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _refuse_not_finite(values: Tensor, name: str, dtype: str) -> None:
    if not bool(values.isfinite().all()):
        raise ShardtuneError(
            f"With the adapter, {name} has values that are not finite in {dtype}.",
            why="The training diverged, or its values are too large for float16."
            if dtype == "float16"
            else "The training diverged, or a file of base or adapter is damaged.",
            fix="Export in bf16 or fp32." if dtype == "float16" else "Export an earlier checkpoint (--checkpoint).",
        )
