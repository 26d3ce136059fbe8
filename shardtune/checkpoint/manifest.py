"""What should be in a checkpoint, and is it? Names, sizes and checksums of its files, and every way they can be wrong.

The checksum is SHA-256: 1.8 GB/s on one core with SHA instructions (0.5 without), so that the 330 MB of a 27-million
parameter adapter with its AdamW state take a fifth of a second, in the background; `sha256sum` reads the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from shardtune.durable import NotPlainError, open_plain, replace_file, write_file

NAME = "manifest.json"
TRAINER = "trainer.json"  # where a run stood, and what it was asked to be
FORMAT = 1
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PIECE = 1 << 20
_LARGEST_MANIFEST = 64 << 20  # bytes; a checkpoint of 100,000 files has 15 MB

Kind = Literal["missing", "truncated", "longer", "changed", "not a plain file", "unreadable", "extra", "wrong step"]


@dataclass(frozen=True)
class Damage:
    """One file of a checkpoint that is not as its manifest says.

    An `extra` file is reported but harmless: only files in the manifest are ever read.
    """

    file: str
    kind: Kind
    detail: str = ""

    @property
    def is_fatal(self) -> bool:
        return self.kind != "extra"

    def __str__(self) -> str:
        return f"{self.file}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


class ManifestError(Exception):
    """The manifest itself cannot be trusted."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


@dataclass(frozen=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself; `about` holds epoch, eval loss, world size, config hash, versions, time."""

    step: int
    files: dict[str, FileEntry]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def eval_loss(self) -> float | None:
        value = self.about.get("eval_loss")
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(entry.size for entry in self.files.values())


def write_manifest(folder: Path, step: int, about: Mapping[str, Any]) -> None:
    """Describe every file of `folder`; the last file to be written into it."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open_plain(path) as file:
                digest = _digest(file)
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest}
    for name in files:
        _check_name(name)
    write_file(folder / NAME, _text(step, about, files))


def amend_manifest(folder: Path, **about: Any) -> None:
    """Add to the manifest of an existing checkpoint; in one rename, so that a reader sees the old one or the new.

    Raises:
        ManifestError: what it said so far cannot be trusted.
    """
    known = read_manifest(folder)
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in known.files.items()}
    replace_file(folder / NAME, _text(known.step, {**known.about, **about}, files))
    (folder / NAME).chmod(0o644)


def _text(step: int, about: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    body = {"format": FORMAT, "step": step, "about": dict(about), "files": files}
    return json.dumps({**body, "self": _body_digest(body)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ManifestError: it is missing, was changed, is of another format, or names a file outside its folder.
    """
    try:
        body = json.loads(_manifest_bytes(folder / NAME))
        said = body.pop("self")
        if said != _body_digest(body):
            raise ManifestError(Damage(NAME, "changed", "its own checksum does not match"))
        if body["format"] != FORMAT:
            raise ManifestError(Damage(NAME, "unreadable", f"format {body['format']}; this version reads {FORMAT}"))
        files = {name: FileEntry(int(e["size"]), str(e["sha256"])) for name, e in body["files"].items()}
        for name in files:
            _check_name(name)
        return Manifest(int(body["step"]), files, dict(body["about"]))
    except OSError as error:
        raise ManifestError(_damage_of(NAME, error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(Damage(NAME, "changed", f"not a manifest: {type(error).__name__}")) from error


def verify(folder: Path, *, contents: bool = True) -> list[Damage]:
    """Everything that is wrong with a checkpoint; empty if nothing is.

    Args:
        contents: Read every byte and compare checksums; False compares names and sizes only.
    """
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        return [error.damage]
    found = [
        damage
        for name, entry in manifest.files.items()
        if (damage := compare_file(folder, name, entry, contents=contents)) is not None
    ]
    present, unreadable = _list_files(folder)
    found += [Damage(name, "extra") for name in sorted(present - set(manifest.files) - {NAME})]
    return found + unreadable


def _list_files(folder: Path) -> tuple[set[str], list[Damage]]:
    """Everything in `folder` that is no folder, by its relative name; and the folders that cannot be listed."""
    failed: list[OSError] = []
    present = {
        (Path(where) / name).relative_to(folder).as_posix()
        for where, _, names in os.walk(folder, onerror=failed.append)
        for name in names
    }
    return present, [_damage_of(Path(error.filename).relative_to(folder).as_posix(), error) for error in failed]


def compare_file(folder: Path, name: str, entry: FileEntry, *, contents: bool = True) -> Damage | None:
    """What is wrong with one file, compared with what a manifest says of it; None if nothing is."""
    path = folder / name
    try:
        with open_plain(path) as file:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise NotPlainError(path)
            size = os.fstat(file.fileno()).st_size
            if size != entry.size:
                kind: Kind = "truncated" if size < entry.size else "longer"
                return Damage(name, kind, f"{size:,} bytes instead of {entry.size:,}")
            if contents and _digest(file) != entry.sha256:
                return Damage(name, "changed", "its checksum does not match")
    except OSError as error:
        return _damage_of(name, error)
    return None


def verify_safetensors(folder: Path, name: str) -> Damage | None:
    """What is wrong with a file of tensors of which no checksum is known: its header describes how long it is."""
    try:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(min(length, size)))
            ends = [entry["data_offsets"][1] for tensor, entry in tensors.items() if tensor != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
    except OSError as error:
        return _damage_of(name, error)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return Damage(name, "changed", "it does not begin with the header of a safetensors file")
    if size != wanted:
        kind: Kind = "truncated" if size < wanted else "longer"
        return Damage(name, kind, f"{size:,} bytes, and its header describes {wanted:,}")
    return None


def _damage_of(name: str, error: OSError) -> Damage:
    if isinstance(error, NotPlainError):
        return Damage(name, "not a plain file")
    if isinstance(error, FileNotFoundError):
        return Damage(name, "missing")
    return Damage(name, "unreadable", error.strerror or str(error))


def _check_name(name: str) -> None:
    """A manifest comes from a disk others may write to: a name in it leads nowhere but into its own folder."""
    if not isinstance(name, str) or not all(_PART.fullmatch(part) for part in name.split("/")):
        raise ManifestError(Damage(NAME, "changed", f"it lists a file outside its folder: {name!r}"))


def _manifest_bytes(path: Path) -> bytes:
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST_MANIFEST:
            raise ManifestError(Damage(NAME, "changed", f"not a manifest: {size:,} bytes"))
        return file.readall()


def _body_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The checksum of a file, as manifests have it."""
    with open_plain(path) as file:
        return _digest(file)


def _digest(file: FileIO) -> str:
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):  # hashing releases the GIL: training goes on beside it
        digest.update(piece)
    return digest.hexdigest()
