"""How are a rank's rows read from disk? Sequential reads of exactly those bytes, by several threads, into place."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardtune.errors import ShardtuneError
from shardtune.kernels import fp8
from shardtune.model.safetensors_headers import StoredTensor
from shardtune.model.weight_mapping import Piece, WeightMapping, scale_grid

# Large enough for a network disk to stream, small enough that threads × chunk stays far below a shard.
_CHUNK = 32 << 20
_THREADS = 4


@dataclass
class ReadProgress:
    """What has been read so far, over all threads."""

    bytes: int = 0
    began: float = field(default_factory=time.perf_counter)
    on_progress: Callable[[int], None] | None = None  # gets the bytes read so far
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
            if self.on_progress is not None:
                self.on_progress(self.bytes)


@dataclass
class QuantisationError:
    """How far the float8 values are from those stored, summed over everything quantised here."""

    difference: float = 0.0  # squares
    size: float = 0.0
    worst: tuple[float, str] = (0.0, "")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, difference: float, size: float) -> None:
        with self._lock:
            self.difference += difference
            self.size += size
            self.worst = max(self.worst, (math.sqrt(difference / size) if size else 0.0, name))

    @property
    def relative(self) -> float:
        return math.sqrt(self.difference / self.size) if self.size else 0.0


@dataclass(frozen=True)
class ReadJob:
    """Some rows of a stored tensor, and the stretch of a parameter they fill.

    Args:
        rows: Of the stored tensor's first dimension.
        into: Contiguous; may lie on a GPU or have another dtype.
        scaled: The piece whose scales its codes are to be multiplied with (`into` is not float8).
        scale_into: Where the weight is quantised on the way: one scale per row goes here.
    """

    stored: StoredTensor
    rows: tuple[int, int]
    into: torch.Tensor
    scaled: Piece | None = None
    scale_into: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.stored.row_bytes


class ShardReader:
    """Reads parameters, or rows of them, as an `WeightMapping` says.

    Every byte is read once and no more than asked for; host memory beyond the parameters themselves is
    `threads` × (chunk + what a chunk becomes). Files stay open until the `with` block ends.
    """

    def __init__(
        self, mapping: WeightMapping, threads: int = _THREADS, on_progress: Callable[[int], None] | None = None
    ) -> None:
        self.mapping = mapping
        self.threads = threads
        self.progress = ReadProgress(on_progress=on_progress)
        self.error = QuantisationError()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self._scales: dict[str, torch.Tensor] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()

    def jobs(
        self, name: str, rows: tuple[int, int], into: torch.Tensor, scale_into: torch.Tensor | None = None
    ) -> list[ReadJob]:
        """What has to be read so that `into` holds `rows` (of the first dimension) of parameter `name`.

        Args:
            scale_into: The same rows of its scales, when a weight that is not stored in float8 is stored in it.
        """
        jobs = []
        for piece in self.mapping.pieces[name]:
            first, last = max(piece.rows[0], rows[0]), min(piece.rows[1], rows[1])
            if first >= last:
                continue
            place = into[first - rows[0] : last - rows[0]]
            scale_place = scale_into[first - rows[0] : last - rows[0]] if scale_into is not None else None
            taken = (first - piece.start[0], last - piece.start[0])
            if len(piece.start) > len(piece.stored.shape):  # one expert of a stack: all of it, at its rows
                taken = (0, piece.stored.shape[0])
                own = slice(piece.start[1], piece.start[1] + taken[1])
                place, scale_place = place[0, own], scale_place[0, own] if scale_place is not None else None
            scaled = piece if piece.scale is not None and into.dtype != torch.float8_e4m3fn else None
            jobs.extend(_in_chunks(piece.stored, taken, place, scaled, scale_place))
        return jobs

    def run(self, jobs: Iterable[ReadJob]) -> None:
        """Do all jobs, each thread a stretch of them in the order they lie on the disk."""
        ordered = sorted(jobs, key=lambda job: (str(job.stored.file), job.stored.offset, job.rows))
        shares = _shares(ordered, self.threads)
        with ThreadPoolExecutor(max_workers=max(1, len(shares)), thread_name_prefix="read") as pool:
            for done in [pool.submit(self._run, share) for share in shares]:
                done.result()

    def scales(self, name: str, rows: tuple[int, int], into: torch.Tensor) -> None:
        """Fill `into` with rows of the grid of scales of a parameter that stays in float8."""
        block = self.mapping.block(name)
        for piece in self.mapping.pieces[name]:
            if len(piece.start) > len(piece.stored.shape):
                if rows[0] <= piece.start[0] < rows[1]:
                    values, first = self.grid(piece), piece.start[1] // block[0]
                    into[piece.start[0] - rows[0], first : first + values.shape[0]].copy_(values)
                continue
            values, lead = self.grid(piece), piece.stored.shape[:-2]
            values = values.expand(*lead, *values.shape[-2:]) if lead else values
            into.copy_(values[rows[0] : rows[1]])

    def whole(self, stored: StoredTensor) -> torch.Tensor:
        """A stored tensor as it is, on the CPU."""
        tensor = torch.empty(stored.shape, dtype=stored.torch_dtype)
        if stored.nbytes:
            self._read(stored, 0, _bytes_of(tensor))
        return tensor

    def rows(self, stored: StoredTensor, first: int, end: int) -> torch.Tensor:
        """Some of a stored tensor's rows, counted over all dimensions but the last: (end - first, columns)."""
        columns = stored.shape[-1] if stored.shape else 1
        tensor = torch.empty((end - first, columns), dtype=stored.torch_dtype)
        if tensor.numel():
            self._read(stored, first * columns * tensor.element_size(), _bytes_of(tensor))
        return tensor

    def pieces(self, stored: StoredTensor, nbytes: int) -> Iterator[torch.Tensor]:
        """A stored tensor's bytes as they are, at most `nbytes` at a time."""
        for first in range(0, stored.nbytes, nbytes):
            piece = torch.empty(min(nbytes, stored.nbytes - first), dtype=torch.uint8)
            self._read(stored, first, piece)
            yield piece

    def grid(self, piece: Piece) -> torch.Tensor:
        """A piece's scales as a grid over its weight, in float32."""
        assert piece.scale is not None
        if piece.scale.name not in self._scales:
            self._scales[piece.scale.name] = self.whole(piece.scale).float().reshape(scale_grid(piece))
        return self._scales[piece.scale.name]

    def _run(self, jobs: list[ReadJob]) -> None:
        for job in jobs:
            into = job.into
            if into.device.type == "cpu" and into.dtype == job.stored.torch_dtype:
                self._read(job.stored, job.rows[0] * job.stored.row_bytes, _bytes_of(into))
                continue
            buffer = self._staging(job)
            self._read(job.stored, job.rows[0] * job.stored.row_bytes, buffer)
            # A GPU gets the bytes as they are stored, and multiplies out or quantises them itself.
            value = buffer.view(job.stored.torch_dtype).reshape(into.shape).to(into.device)
            if job.scaled is not None:
                value = self._dequantized(value, job.scaled, job)
            elif job.scale_into is not None:
                value = self._quantized(value, job)
            into.copy_(value)

    def _dequantized(self, codes: torch.Tensor, piece: Piece, job: ReadJob) -> torch.Tensor:
        scale, block = self.grid(piece).to(codes.device), piece.block(self.mapping.declared_block)
        if codes.dim() == 2:
            return fp8.dequantize_rows(codes, scale, block, job.rows[0], job.into.dtype)
        experts = scale.expand(job.stored.shape[0], *scale.shape[1:])[job.rows[0] : job.rows[1]]
        return fp8.dequantize(codes, experts, block, job.into.dtype)

    def _quantized(self, value: torch.Tensor, job: ReadJob) -> torch.Tensor:
        assert job.scale_into is not None
        exact = value.float()
        codes, scale = fp8.quantize_rows(exact)
        job.scale_into.copy_(scale)
        difference = fp8.dequantize(codes, scale, (1, exact.shape[-1]), torch.float32).sub_(exact)
        self.error.add(job.stored.name, float(difference.square_().sum()), float(exact.square_().sum()))
        return codes

    def _staging(self, job: ReadJob) -> torch.Tensor:
        """This thread's buffer, page-locked where a GPU copies from it."""
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < job.nbytes:
            buffer = torch.empty(max(job.nbytes, _CHUNK), dtype=torch.uint8, pin_memory=job.into.device.type == "cuda")
            self._own.buffer = buffer
        return buffer[: job.nbytes]

    def _read(self, stored: StoredTensor, skip: int, into: torch.Tensor) -> None:
        view = memoryview(into.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        with self._lock:
            if stored.file not in self._files:
                self._files[stored.file] = os.open(stored.file, os.O_RDONLY)
        handle = self._files[stored.file]
        at = stored.offset + skip
        while view:
            count = os.preadv(handle, [view], at)
            if count == 0:
                raise ShardtuneError(
                    f"'{stored.file}' ended within tensor '{stored.name}'.",
                    why="The file was truncated while it was being read.",
                    fix="Do not modify the checkpoint while a run loads it.",
                )
            at, view = at + count, view[count:]
            self.progress.add(count)


def _in_chunks(
    stored: StoredTensor,
    rows: tuple[int, int],
    into: torch.Tensor,
    scaled: Piece | None,
    scale_into: torch.Tensor | None,
) -> list[ReadJob]:
    step = max(1, _CHUNK // max(1, stored.row_bytes))
    jobs = []
    for first in range(rows[0], rows[1], step):
        last = min(first + step, rows[1])
        here = slice(first - rows[0], last - rows[0])
        jobs.append(
            ReadJob(stored, (first, last), into[here], scaled, scale_into[here] if scale_into is not None else None)
        )
    return jobs


def _shares(jobs: list[ReadJob], count: int) -> list[list[ReadJob]]:
    """Cut the list into `count` stretches of about the same bytes."""
    total = sum(job.nbytes for job in jobs)
    shares: list[list[ReadJob]] = [[]]
    seen = 0
    for job in jobs:
        if seen >= total * len(shares) / count:
            shares.append([])
        shares[-1].append(job)
        seen += job.nbytes
    return [share for share in shares if share]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
