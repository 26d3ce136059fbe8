"""How are float8 weights multiplied without becoming bf16 first? Activations are rounded to float8 too, row by row.

Each row of the activations gets a scale of its own when it is needed (dynamic scaling), a frozen weight has one for each
of its rows. The backward pass needs the transposed weight: its codes are transposed into memory that lives for one
product. The eager twin rounds the same way and multiplies in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardtune.kernels.fp8 import CODES, LARGEST_CODE, Block

_ALIGNED = 16  # bytes; rows of both factors must be a multiple of it


def usable(device: torch.device) -> bool:
    """Whether the chip multiplies float8 with a scale per row: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def row_scales(scale: Tensor, block: Block, shape: torch.Size | tuple[int, ...]) -> Tensor | None:
    """One scale for each row of a weight of `shape`, (..., R); None where a row has several."""
    if scale.shape[-1] != 1 or shape[-1] % _ALIGNED or shape[-2] % _ALIGNED:
        return None
    rows: Tensor = scale[..., 0].repeat_interleave(block[0], dim=-1)[..., : shape[-2]]
    return rows.contiguous()


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (n, c) and scales (n,): the largest element of each row becomes the largest code."""
    values = x.float()
    scale = values.abs().amax(dim=-1) / LARGEST_CODE
    scale = torch.where(scale == 0, 1.0, scale)
    return (values / scale[:, None]).clamp(-LARGEST_CODE, LARGEST_CODE).to(CODES), scale


def linear(x: Tensor, codes: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` with x (..., in) rounded to float8; `rows` are the scales of the weight's rows, (out,)."""
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), codes, rows)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.view(*x.shape[:-1], codes.shape[0])


def grouped_linear(x: Tensor, codes: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Rows of group e times `weight[e].T`; `codes` (E, out, in), `rows` (E, out), `ends` (E,) int32."""
    result: Tensor = _GroupedLinear.apply(x, codes, rows, ends)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(codes, rows)
        return _product(*quantize_activations(x), codes, rows, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        codes, rows = ctx.saved_tensors
        # The weight's scales stand on the rows that are summed over: they move into the gradient.
        scaled, scale = quantize_activations(grad.float() * rows)
        return _product(scaled, scale, transposed(codes), rows.new_ones(codes.shape[1]), grad.dtype), None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(codes, rows, ends)
        return _grouped_product(*quantize_activations(x), codes, rows, ends, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        codes, rows, ends = ctx.saved_tensors
        places = torch.arange(grad.shape[0], device=grad.device, dtype=ends.dtype)
        expert = torch.searchsorted(ends, places, right=True)
        scaled, scale = quantize_activations(grad.float() * rows[expert])
        ones = rows.new_ones(codes.shape[0], codes.shape[2])
        return _grouped_product(scaled, scale, transposed(codes), ones, ends, grad.dtype), None, None, None


def _product(x: Tensor, scale: Tensor, codes: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cuda:
        return torch._scaled_mm(
            x, codes.t(), scale[:, None], rows[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype)
    return ((x.float() * scale[:, None]) @ (codes.float() * rows[:, None]).t()).to(dtype)


def _grouped_product(x: Tensor, scale: Tensor, codes: Tensor, rows: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cuda:
        return torch._scaled_grouped_mm(
            x, codes.transpose(-2, -1), scale, rows, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype)
    bounds = [0, *ends.tolist()]
    parts = [
        (x[start:end].float() * scale[start:end, None]) @ (codes[group].float() * rows[group, :, None]).t()
        for group, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
    return torch.cat(parts).to(dtype)


@torch.library.custom_op("shardtune::transposed_codes", mutates_args=())
def transposed(codes: Tensor) -> Tensor:
    """(..., R, C) codes as (..., C, R). torch's own copy moves single bytes: eleven times slower on an H200."""
    if not codes.is_cuda:
        return codes.view(torch.uint8).transpose(-2, -1).contiguous().view(CODES)
    from shardtune.kernels.transpose import transpose_bytes

    return transpose_bytes(codes.view(torch.uint8)).view(CODES)


@transposed.register_fake
def _(codes: Tensor) -> Tensor:
    return codes.new_empty(*codes.shape[:-2], codes.shape[-1], codes.shape[-2])
