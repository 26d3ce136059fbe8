"""How are changed weights rounded to the base's own FP8 layout? Its blocks; a scale grows where values outgrow it."""

from __future__ import annotations

import torch
from torch import Tensor

from shardtune.kernels import fp8


class BlockScales:
    """The scales of one stored tensor, before and after.

    A block keeps its scale while its values fit: what the adapter does not change keeps its code exactly. Drawing all
    scales anew would keep no more of the change, and would move everything else.

    Args:
        old: (matrices, row blocks, column blocks), float32; one matrix where all share its scales.
        dtype: Of the scales in the checkpoint.
    """

    def __init__(self, old: Tensor, block: fp8.Block, dtype: torch.dtype) -> None:
        self.old, self.block, self.dtype = old, block, dtype
        self.largest = torch.zeros_like(old)

    def measure(self, values: Tensor, matrix: int, first_row: int) -> None:
        """Take notice of the new values (float32) of some rows of a matrix."""
        rows, columns = values.shape
        padding = -columns % self.block[1]
        blocks = torch.nn.functional.pad(values.abs(), (0, padding)).unflatten(1, (-1, self.block[1])).amax(-1)
        largest, height = self._largest(matrix), self.block[0]
        for number in range(first_row // height, (first_row + rows - 1) // height + 1):
            part = blocks[max(0, number * height - first_row) : (number + 1) * height - first_row].amax(0)
            largest[number] = torch.maximum(largest[number], part)

    @property
    def new(self) -> Tensor:
        """In float32, exactly as the checkpoint's dtype will hold them."""
        needed = self.largest / fp8.LARGEST_CODE
        grown = _rounded_up(needed, self.dtype)
        return torch.where(needed > self.old, grown, self.old)

    def quantize(self, values: Tensor, matrix: int, first_row: int) -> tuple[Tensor, Tensor]:
        """Codes of some rows, and the values that they stand for."""
        rows, columns = values.shape
        scales = self.new[matrix if len(self.old) > 1 else 0][self._row_blocks(first_row, rows)]
        scales = scales.repeat_interleave(self.block[1], 1)[:, :columns]
        safe = torch.where(scales == 0, 1.0, scales)
        codes = (values / safe).clamp_(-fp8.LARGEST_CODE, fp8.LARGEST_CODE).to(fp8.CODES)
        return codes, codes.float() * scales

    def _largest(self, matrix: int) -> Tensor:
        return self.largest[matrix if len(self.old) > 1 else 0]

    def _row_blocks(self, first: int, rows: int) -> Tensor:
        return torch.arange(first, first + rows) // self.block[0]


def _rounded_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In a coarser dtype a scale must not become smaller than its block needs."""
    held = scale.to(dtype).float()
    return torch.where(held < scale, (scale * (1 + 2 * torch.finfo(dtype).eps)).to(dtype).float(), held)
