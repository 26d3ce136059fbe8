"""How is a weight stored in one byte? As float8 codes and a float32 scale per block of them.

A quantised weight is `codes` (float8_e4m3fn, shape (..., R, C)), `scale` (float32, one number for each block, shape
(..., ceil(R / rows), ceil(C / columns))) and `block` = (rows, columns). An element's value is its code times the scale
of its block. One scale for the whole matrix is the block (R, C), one for each row (1, C); blocks at the edge may be
ragged.

What is multiplied with it is in `fp8_products`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0  # the largest finite float8_e4m3fn
Block = tuple[int, int]

# On CPU a product of mixed dtypes makes float32 copies. Pieces of this many elements keep each of them at 64 MB.
_PIECE = 1 << 24


def scale_shape(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The shape of the scales of a weight of `shape`: its leading dimensions, then one for each block.

    Example:
        >>> scale_shape((8, 300, 256), (128, 128))
        (8, 3, 2)
    """
    if len(shape) < 2 or min(block) < 1:
        raise ValueError(f"A weight of shape {tuple(shape)} has no blocks of {block}.")
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU. Asked for in every product, where torch's own answer takes as long as the launch of a kernel."""
    return torch.cuda.get_device_capability(device)


def dequantize(codes: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`: each product is taken in float32 and rounded once.

    It is elementwise, so rows dequantised by themselves equal the same rows of the whole, bit for bit. Nothing of the
    weight's size is allocated beside the result: every code is exact in bfloat16, float16 and float32.
    """
    _check(codes, scale)
    if tuple(scale.shape) != scale_shape(codes.shape, block):
        raise ValueError(
            f"Codes of shape {tuple(codes.shape)} in blocks of {block} have scales of shape "
            f"{scale_shape(codes.shape, block)}, not {tuple(scale.shape)}."
        )
    if codes.device.type == "cuda" and capability(codes.device) >= (8, 9):
        from shardtune.kernels.fp8_passes import dequantize_codes  # needs Triton, which comes with torch for CUDA

        return dequantize_codes(codes, scale, block, dtype)
    return dequantize_rows(codes, scale, block, 0, dtype)


def dequantize_rows(codes_rows: Tensor, scale: Tensor, block: Block, first_row: int, dtype: torch.dtype) -> Tensor:
    """Rows `first_row`, `first_row + 1`, ... of a weight, from their codes and the scales of the whole weight.

    Args:
        codes_rows: (..., n, C). The first row may lie anywhere within a block.
        scale: All scales of the weight, (..., ceil(R / block rows), ceil(C / block columns)).
    """
    _check(codes_rows, scale)
    last = (first_row + codes_rows.shape[-2] - 1) // block[0]
    if last >= scale.shape[-2] or scale.shape[-1] != scale_shape(codes_rows.shape, block)[-1]:
        raise ValueError(
            f"{codes_rows.shape[-2]} rows of {codes_rows.shape[-1]} columns from row {first_row} in blocks of {block} "
            f"are not covered by scales of shape {tuple(scale.shape)}."
        )
    weight = codes_rows.to(dtype)
    for rows, of_rows, height in _runs(codes_rows.shape[-2], block[0], first_row, _rows_at_once(codes_rows)):
        for columns, of_columns, width in _runs(codes_rows.shape[-1], block[1], 0, codes_rows.shape[-1]):
            scales = scale[..., of_rows, of_columns]
            # A view (..., row blocks, rows, column blocks, columns): the scales broadcast over rows and columns.
            blocks = weight[..., rows, columns].unflatten(-1, (scales.shape[-1], width))
            blocks = blocks.unflatten(-3, (scales.shape[-2], height))
            blocks.mul_(scales.unsqueeze(-2).unsqueeze(-1))
    return weight


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, one scale for each row: (..., R, C) gives codes (..., R, C) and scales (..., R, 1).

    The largest element of a row becomes the largest code. A row of zeros gets the scale 1.
    """
    codes = torch.empty(weight.shape, dtype=CODES, device=weight.device)
    scale = torch.empty((*weight.shape[:-1], 1), dtype=torch.float32, device=weight.device)
    columns = weight.shape[-1]
    flat, flat_codes, flat_scale = weight.reshape(-1, columns), codes.view(-1, columns), scale.view(-1, 1)
    for rows in _slices(flat):
        values = flat[rows].float()
        one = values.abs().amax(dim=-1, keepdim=True) / LARGEST_CODE
        one = torch.where(one == 0, 1.0, one)
        flat_scale[rows] = one
        flat_codes[rows] = (values / one).clamp_(-LARGEST_CODE, LARGEST_CODE).to(CODES)
    return codes, scale


def quantization_error(weight: Tensor, codes: Tensor, scale: Tensor) -> tuple[float, float]:
    """What `quantize_rows` lost: the difference's Frobenius norm over the weight's own, and its largest element."""
    columns = weight.shape[-1]
    flat, flat_codes, flat_scale = weight.reshape(-1, columns), codes.reshape(-1, columns), scale.reshape(-1, 1)
    lost, whole, largest = 0.0, 0.0, [0.0]
    for rows in _slices(flat):
        values = flat[rows].float()
        difference = dequantize(flat_codes[rows], flat_scale[rows], (1, columns), torch.float32).sub_(values)
        lost += difference.square().sum(dtype=torch.float64).item()
        whole += values.square().sum(dtype=torch.float64).item()
        largest.append(difference.abs().max().item())
    # torch's maximum, because Python's loses a NaN: a weight that is not finite must show.
    return ((lost / whole) ** 0.5 if whole else lost**0.5), torch.tensor(largest, dtype=torch.float64).max().item()


def _check(codes: Tensor, scale: Tensor) -> None:
    if codes.dtype != CODES or scale.dtype != torch.float32:
        raise ValueError(f"Expected {CODES} codes and float32 scales, got {codes.dtype} and {scale.dtype}.")


def _runs(length: int, block: int, first: int, at_once: int) -> Iterator[tuple[slice, slice, int]]:
    """`length` elements of which the first is number `first`, cut where blocks begin: (elements, their scales, height).

    A run is several whole blocks or a part of one, and at most `at_once` elements.
    """
    done = 0
    while done < length:
        number, within = divmod(first + done, block)
        most = min(at_once, length - done)
        whole = most // block if within == 0 else 0
        count, height = (whole, block) if whole else (1, min(most, block - within))
        yield slice(done, done + count * height), slice(number, number + count), height
        done += count * height


def _rows_at_once(codes: Tensor) -> int:
    # A GPU casts within the kernel, so that one pass over the whole is leanest and fastest.
    per_row = max(1, codes.numel() // max(1, codes.shape[-2]))
    return max(1, _PIECE // per_row) if codes.device.type == "cpu" else max(1, codes.shape[-2])


def _slices(flat: Tensor) -> Iterator[slice]:
    step = max(1, _PIECE // max(1, flat.shape[1]))
    for start in range(0, flat.shape[0], step):
        yield slice(start, start + step)
