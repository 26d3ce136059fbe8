"""How are float8 weights multiplied without becoming bf16 first? Activations are rounded to float8 too, row by row.

A row of the activations gets its scale when it is needed (dynamic scaling), and what is added up within a product must
have one scale on either side:

- A weight with one scale for each row, or for several whole rows: rows against rows. In backward the weight's scales
  stand on what is added up, so they move into the gradient before that is rounded.
- A weight in blocks of 128 x 128, as many checkpoints have it: neither folding nor a second rounding of the codes, but
  activations in pieces of 128 columns and torch's own product for that, so the weight is what the checkpoint says.
- Any other block: the weight is dequantised for the product, as without FP8 compute.

Backward needs the codes transposed: they are, into memory that lives for one product. The eager twin, where the chip
has no float8 units, rounds the same way and multiplies the rounded values in the activations' dtype.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from shardtune.kernels.fp8 import CODES, LARGEST_CODE, Block, capability, dequantize
from shardtune.kernels.grouped import grouped_product

_ALIGNED = 16  # both sides of a matrix must be a multiple of it, in bytes
_BLOCK = (128, 128)
_BLOCK_ALIGNED = 512  # scales of blocks are read four at a time


def why_not(shape: torch.Size | tuple[int, ...], block: Block) -> str | None:
    """Why codes of this shape with such blocks are not multiplied as they are; None if they are."""
    out, into = shape[-2:]
    if out % _ALIGNED or into % _ALIGNED:
        return f"sides that are no multiples of {_ALIGNED}"
    if block[1] >= into:
        return None
    if block != _BLOCK:
        return f"scales for blocks of {block[0]} × {block[1]}"
    if len(shape) > 2:
        return "scales for blocks of 128 × 128, which torch has no grouped product for"
    if out % _BLOCK_ALIGNED or into % _BLOCK_ALIGNED:
        return f"scales for blocks of 128 × 128 and sides that are no multiples of {_BLOCK_ALIGNED}"
    return None


def rounding_width(shape: torch.Size | tuple[int, ...], block: Block) -> int | None:
    """How many columns of the activations share a scale in a product with such codes; None if they are not rounded."""
    if why_not(shape, block):
        return None
    return shape[-1] if block[1] >= shape[-1] else _BLOCK[1]


def missing_units(device: torch.device) -> str | None:
    """What this device lacks for products of float8 codes; None if it has them."""
    if device.type != "cuda":
        return f"a {device.type} has no float8 units"
    found = capability(device)
    if found < (9, 0):
        return f"this GPU (compute capability {found[0]}.{found[1]}) is older than Hopper"
    return None


def rounded(x: Tensor, width: int, by: Tensor | None = None, group: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes (n, c) and scales (n, c / width): of every `width` elements the largest becomes the largest code.

    Args:
        x: (n, c).
        by: (groups, c) or (c,): what each row is multiplied with before it is rounded.
        group: (n,): which row of `by` that is.
    """
    if _one_pass(x):
        from shardtune.kernels.fp8_passes import round_rows

        return round_rows(x, width, by, group)
    values = x.float()
    if by is not None:
        values = values * (by if group is None else by[group])
    pieces = values.unflatten(-1, (-1, width))
    largest = pieces.abs().amax(dim=-1, keepdim=True)
    # A number divided by a tensor is rounded twice in torch (reciprocal, then product): ties would fall the other way.
    inverse = torch.where(largest == 0, 1.0, torch.full_like(largest, LARGEST_CODE) / largest)
    codes = (pieces * inverse).clamp(-LARGEST_CODE, LARGEST_CODE).to(CODES)
    return codes.flatten(-2), torch.where(largest == 0, 1.0, largest / LARGEST_CODE).squeeze(-1)


def transposed(codes: Tensor) -> Tensor:
    """(..., R, C) codes as (..., C, R), contiguous."""
    if _one_pass(codes):
        from shardtune.kernels.fp8_passes import transpose_codes

        return transpose_codes(codes)
    return codes.view(torch.uint8).transpose(-2, -1).contiguous().view(CODES)


def product(
    x: Tensor,
    x_codes: Tensor | None,
    x_scale: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    block: Block,
    bias: Tensor | None = None,
) -> Tensor:
    """(n, in) and (out, in) to (n, out), with a bias (out,) in x's dtype.

    Args:
        x_codes: x, rounded as `rounding_width` says, with its scales; None = the weight is dequantised.
    """
    by_rows = block[1] >= codes.shape[1]
    if x_codes is None or x_scale is None:
        return F.linear(x, dequantize(codes, scale, block, x.dtype), bias)
    if not _on_units(x, by_rows=by_rows):
        return F.linear(_values(x_codes, x_scale, x.dtype), dequantize(codes, scale, block, x.dtype), bias)
    rows = _row_scales(scale, block, codes.shape) if by_rows else None
    out = _by_blocks(x_codes, x_scale, codes, scale) if rows is None else _by_rows(x_codes, x_scale, codes, rows)
    return out if bias is None else out.add_(bias)


def product_back(grad: Tensor, codes: Tensor, scale: Tensor, block: Block, fp8_compute: bool) -> Tensor:
    """(n, out) and (out, in) to (n, in)."""
    if not fp8_compute or why_not(codes.shape, block):
        return grad @ dequantize(codes, scale, block, grad.dtype)
    if block[1] < codes.shape[1]:
        seen = rounded(grad, _BLOCK[1])
        if not _on_units(grad, by_rows=False):
            return _values(*seen, grad.dtype) @ dequantize(codes, scale, block, grad.dtype)
        return _by_blocks(*seen, transposed(codes), scale.t().contiguous())
    seen = rounded(grad, grad.shape[1], _row_scales(scale, block, codes.shape))
    if not _on_units(grad, by_rows=True):
        return _values(*seen, grad.dtype) @ codes.to(grad.dtype)
    return _by_rows(*seen, transposed(codes), _ones(codes.device, codes.shape[1]))


def grouped(x: Tensor, codes: Tensor, scale: Tensor, block: Block, ends: Tensor, fp8_compute: bool) -> Tensor:
    """(n, in) and (E, out, in) to (n, out)."""
    if not fp8_compute or why_not(codes.shape, block):
        return grouped_product(x, dequantize(codes, scale, block, x.dtype), ends)
    seen = rounded(x, x.shape[1])
    if not _on_units(x, by_rows=True):
        return grouped_product(_values(*seen, x.dtype), dequantize(codes, scale, block, x.dtype), ends)
    return _grouped_by_rows(*seen, codes, _row_scales(scale, block, codes.shape), ends)


def grouped_back(grad: Tensor, codes: Tensor, scale: Tensor, block: Block, ends: Tensor, fp8_compute: bool) -> Tensor:
    """(n, out) and (E, out, in) to (n, in)."""
    if not fp8_compute or why_not(codes.shape, block):
        return grouped_product(grad, dequantize(codes, scale, block, grad.dtype).transpose(-2, -1), ends)
    rows = _row_scales(scale, block, codes.shape)
    places = torch.arange(grad.shape[0], device=grad.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, places, right=True)
    seen = rounded(grad, grad.shape[1], rows, group)
    if not _on_units(grad, by_rows=True):
        return grouped_product(_values(*seen, grad.dtype), codes.to(grad.dtype).transpose(-2, -1), ends)
    ones = _ones(codes.device, codes.shape[0], codes.shape[2])
    return _grouped_by_rows(*seen, transposed(codes), ones, ends)


def _by_rows(x: Tensor, scale: Tensor, codes: Tensor, rows: Tensor) -> Tensor:
    return torch._scaled_mm(
        x, codes.t(), scale.contiguous(), rows[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _by_blocks(x: Tensor, scale: Tensor, codes: Tensor, blocks: Tensor) -> Tensor:
    # Scales of pieces lie column by column, as `rounded` makes them; those of blocks as the checkpoint has them.
    out: Tensor = torch._scaled_mm(x, codes.t(), scale, blocks.t(), out_dtype=torch.bfloat16)
    return out


def _grouped_by_rows(x: Tensor, scale: Tensor, codes: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    # torch asks for 16-byte strides and nothing of the groups' sizes: rows of one group begin where a row begins, and
    # scales are read one by one (its grouped kernel, with groups along the rows of the first factor).
    return torch._scaled_grouped_mm(
        x, codes.transpose(-2, -1), scale.flatten(), rows, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _row_scales(scale: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """One scale for each row of a weight of `shape`: (..., R), contiguous."""
    if block[0] == 1 and scale.shape[-1] == 1:
        return scale.squeeze(-1)
    each = scale[..., 0].unsqueeze(-1).expand(*scale.shape[:-1], min(block[0], shape[-2])).flatten(-2)
    return each[..., : shape[-2]].contiguous()


def _values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What a product of float8 codes sees, in `dtype`."""
    pieces = codes.float().unflatten(-1, (scale.shape[-1], -1))
    values: Tensor = (pieces * scale.unsqueeze(-1)).flatten(-2)
    return values.to(dtype)


def _on_units(x: Tensor, *, by_rows: bool) -> bool:
    if x.dtype != torch.bfloat16 or x.shape[0] == 0 or missing_units(x.device) is not None:
        return False
    if by_rows:
        return True
    # cuBLAS has the product of pieces and blocks from CUDA 12.9 on, for Hopper, with scales read four at a time.
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return version >= (12, 9) and capability(x.device) == (9, 0) and x.shape[0] % 4 == 0


def _one_pass(x: Tensor) -> bool:
    return x.device.type == "cuda" and capability(x.device) >= (8, 9)


@lru_cache(maxsize=64)
def _ones(device: torch.device, *sizes: int) -> Tensor:
    """Scales that say nothing, where the other factor has taken them on."""
    return torch.ones(sizes, dtype=torch.float32, device=device)
