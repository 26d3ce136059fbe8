"""What exactly is trained on, on disk? A folder of flat arrays that every process maps into memory.

tokens.bin       int32, all rows one after the other
supervised.bin   uint8 per token: 1 where it carries loss
offsets.bin      int64, rows + 1: where each stored row starts
learnt.bin       int32 per stored row: tokens that carry loss and are predicted (the first of a row never is)
taken.bin        int64 per row: its stored row. Only where weights repeat rows or leave some out
packs.N.bin      int64: which rows share a sequence of N tokens; then a checksum. Made when first asked for
manifest.json    counts, settings, sizes and checksums. Written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardtune.data.packing import Packs, pack
from shardtune.data.tokens import IGNORED
from shardtune.errors import UserInputError

log = logging.getLogger(__name__)

SCHEMA = 1  # of the files above; another number is not read
MANIFEST = "manifest.json"
_TYPES: dict[str, type[np.generic]] = {
    "tokens.bin": np.int32, "supervised.bin": np.uint8, "offsets.bin": np.int64, "learnt.bin": np.int32,
    "taken.bin": np.int64,
}  # fmt: skip
_SHA256_BYTES = 32
_LOOKED_AT_ONCE = 1 << 24  # tokens
_CHECKED = 16 * 2**20  # files up to this size carry a checksum, which costs some 10 ms to compare when opened


@dataclass(frozen=True)
class CountedRemark:
    """What was noticed in some rows (`RowRemark`), in how many, and where first."""

    kind: str
    detail: str
    rows: int
    first: str


@dataclass(frozen=True)
class PreparedCounts:
    """What became of the rows of a split. `tokens` and `supervised` are those of one epoch (`rows`)."""

    read: int
    rows: int
    tokens: int
    supervised: int
    cut: int = 0  # rows that lost their end (data.long_rows: truncate)
    split: int = 0  # rows cut into several
    dropped_long: int = 0
    dropped_short: int = 0  # blank, or under two tokens
    dropped_unsupervised: int = 0
    without_assistant: int = 0  # of these: conversations in which no turn carries loss
    skipped_errors: int = 0
    duplicates: int = 0  # stored rows whose tokens an earlier one has too
    largest_id: int = 0
    without_eos: int = 0  # rows whose supervised tokens hold no end token
    errors: tuple[str, ...] = ()  # place and message of the first few rows skipped
    remarks: tuple[CountedRemark, ...] = ()

    def fill_share(self, capacity: int) -> float:
        """How much of a sequence of `capacity` tokens a row takes on average."""
        return self.tokens / (self.rows * capacity)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PreparedCounts:
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        remarks = tuple(CountedRemark(**remark) for remark in given.get("remarks", ()))
        return cls(**{**given, "errors": tuple(given.get("errors", ())), "remarks": remarks})


class Prepared:
    """The rows of one split, read from a folder without loading it. Safe to share between processes."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.counts = PreparedCounts.from_dict(manifest["counts"])
        self._tokens = self._map("tokens.bin")
        self._supervised = self._map("supervised.bin")
        self._offsets = self._map("offsets.bin")
        self._taken = self._map("taken.bin") if "taken.bin" in manifest["files"] else None

    @classmethod
    def open(cls, folder: Path | str) -> Prepared:
        """Raises UserInputError when the folder is not a whole prepared split of this version."""
        folder = Path(folder)
        return cls(folder, read_manifest(folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared.open, (self.folder,)  # a mapped array would be pickled with all it holds

    def __len__(self) -> int:
        return self.counts.rows

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(token ids, labels) of one row, as arrays of its own; labels are not shifted, IGNORED carries no loss."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        stored = number if self._taken is None else int(self._taken[number])
        span = slice(int(self._offsets[stored]), int(self._offsets[stored + 1]))
        ids: NDArray[np.int32] = np.array(self._tokens[span])
        return ids, np.where(self._supervised[span], ids, np.int32(IGNORED))

    def absent(self, ids: Iterable[int]) -> set[int]:
        """Those of `ids` that no row holds. Reads until all are found."""
        left = set(ids)
        for start in range(0, len(self._tokens), _LOOKED_AT_ONCE):
            part = self._tokens[start : start + _LOOKED_AT_ONCE]
            left -= set(part[np.isin(part, list(left))].tolist())
            if not left:
                break
        return left

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return self._per_row(np.diff(self._offsets))

    @cached_property
    def supervised(self) -> NDArray[np.int32]:
        """Tokens of each row that carry loss and are predicted."""
        return self._per_row(np.asarray(self._map("learnt.bin")))

    def packs(self, capacity: int) -> Packs:
        """Which rows share a sequence of `capacity` tokens; computed once and kept beside the rows.

        Several processes may ask at once: each computes the same and puts it in place whole.
        """
        file = self.folder / f"packs.{capacity}.bin"
        rows = json.dumps(
            [capacity, self.manifest["files"]], sort_keys=True
        ).encode()  # those of another set do not fit
        if file.is_file():
            found = _read_packs(file, rows)
            if found is not None:
                return found
            log.warning("%s is damaged, of other rows or of another version: it is made again", file)
        packs = pack(self.lengths, capacity)
        content = np.concatenate([[len(packs)], packs.offsets, packs.rows]).astype(np.int64).tobytes()
        try:
            _write_whole(file, content + hashlib.sha256(rows + content).digest())
        except OSError as error:  # a prepared set on a disk that may only be read
            log.info("packs of %s are not kept: %s", self.folder, error)
        return packs

    def _map(self, name: str) -> NDArray[Any]:
        if not self.manifest["files"][name]["bytes"]:
            return np.empty(0, _TYPES[name])
        return np.memmap(self.folder / name, dtype=_TYPES[name], mode="r")

    def _per_row(self, stored: NDArray[Any]) -> NDArray[Any]:
        return stored if self._taken is None else stored[self._taken]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared split whose files are all there, whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["schema"]
        if version == SCHEMA:
            for name, entry in manifest["files"].items():
                _check_file(folder / name, entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserInputError(
            f"'{folder}' is not a whole prepared dataset.",
            why=f"{type(error).__name__}: {error}",
            fix="Copy it again, all files of it, or delete it and prepare it anew: shardtune data prepare CONFIG",
        ) from error
    if version != SCHEMA:
        raise UserInputError(
            f"'{folder}' was prepared by another version of shardtune.",
            why=f"Its files have the layout {version}; this version reads {SCHEMA}.",
            fix="Prepare it anew: shardtune data prepare CONFIG",
        )
    return dict(manifest)


class PreparedWriter:
    """Writes a prepared split, row by row; what it keeps in memory is some 20 bytes a row, never the tokens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.rows = 0
        self.tokens = 0
        self._files = {name: (folder / name).open("wb") for name in _TYPES if name != "taken.bin"}
        self._files["offsets.bin"].write(np.zeros(1, np.int64).tobytes())
        self._hashes: list[NDArray[np.uint64]] = []
        self.tokensless: list[NDArray[np.bool_]] = []
        self._largest = 0

    def add(self, rows: EncodedRows) -> None:
        offsets = self.tokens + np.cumsum(rows.lengths, dtype=np.int64)
        written = {"tokens.bin": rows.ids, "supervised.bin": rows.supervised, "offsets.bin": offsets}
        for name, values in {**written, "learnt.bin": rows.learnt}.items():
            self._files[name].write(np.ascontiguousarray(values, dtype=_TYPES[name]).data)
        self.rows += len(rows.lengths)
        self.tokens += len(rows.ids)
        self._hashes.append(rows.hashes)
        self.tokensless.append(~rows.has_end)
        self._largest = max(self._largest, int(rows.ids.max(initial=0)))

    def hashes(self) -> NDArray[np.uint64]:
        """A hash of each stored row's tokens."""
        return np.concatenate(self._hashes) if self._hashes else np.empty(0, np.uint64)

    def close(self, tally: dict[str, Any], taken: NDArray[np.int64] | None, about: dict[str, Any]) -> PreparedCounts:
        """Finish the folder; the manifest comes last.

        Args:
            tally: The counts that only the reader of the rows knows.
            taken: Stored row of each row of an epoch; None = each once, in order.
            about: What else the manifest says.
        """
        for file in self._files.values():
            file.close()
        if taken is not None:
            (self.folder / "taken.bin").write_bytes(taken.astype(np.int64).tobytes())
        counts = self._count(tally, taken)
        names = [name for name in _TYPES if (self.folder / name).exists()]
        manifest = {
            "schema": SCHEMA,
            "counts": counts.as_dict(),
            **about,
            "files": {name: _describe(self.folder / name) for name in names},
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        return counts

    def _count(self, tally: dict[str, Any], taken: NDArray[np.int64] | None) -> PreparedCounts:
        lengths = np.diff(np.fromfile(self.folder / "offsets.bin", np.int64))
        learnt = np.fromfile(self.folder / "learnt.bin", np.int32)
        endless = np.concatenate(self.tokensless) if self.tokensless else np.empty(0, np.bool_)
        if taken is not None:
            lengths, learnt, endless = lengths[taken], learnt[taken], endless[taken]
        hashes = self.hashes()
        return PreparedCounts(
            **tally,
            rows=len(lengths),
            tokens=int(lengths.sum()),
            supervised=int(learnt.sum(dtype=np.int64)),
            duplicates=len(hashes) - len(np.unique(hashes)),
            largest_id=self._largest,
            without_eos=int(endless.sum()),
        )


@dataclass(frozen=True)
class EncodedRows:
    """Some rows, ready to be written: token ids and masks one after the other, and what is known of each row."""

    ids: NDArray[np.int32]
    supervised: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    learnt: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    has_end: NDArray[np.bool_]


def _describe(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"bytes": size, "sha256": _checksum(file) if size <= _CHECKED else None}


def _check_file(file: Path, entry: dict[str, Any]) -> None:
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(f"{file.name} has {size} bytes instead of {entry['bytes']}")
    if entry["sha256"] is not None and _checksum(file) != entry["sha256"]:
        raise ValueError(f"{file.name} has other bytes than were written")


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_packs(file: Path, rows: bytes) -> Packs | None:
    """The packs, if the file holds what was written for these rows."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    content, checksum = content[:-_SHA256_BYTES], content[-_SHA256_BYTES:]
    if hashlib.sha256(rows + content).digest() != checksum:
        return None
    values = np.frombuffer(content, np.int64)
    return Packs(values[values[0] + 2 :], values[1 : values[0] + 2])


def _write_whole(file: Path, content: bytes) -> None:
    """Put `content` in place of `file` at once. Names of staging files are unique: other processes may do the same."""
    handle, staging = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            os.fchmod(stream.fileno(), 0o644)  # mkstemp makes it private; other users may train on the set
            stream.flush()
            os.fsync(stream.fileno())
        Path(staging).replace(file)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise
