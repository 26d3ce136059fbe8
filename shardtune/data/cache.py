"""Has this been prepared already? A name made of content, a lock, and a folder that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.data.prepared import SCHEMA
from shardtune.data.readers import DataFile
from shardtune.data.source import FileSplit, Split, TableSplit
from shardtune.durable import fsync
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardtune.config.schema import DataSection
    from shardtune.data.formats import FormatChoice

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_REMEMBERED = 32 * 2**20  # files from this size on are not hashed again while they look untouched
_SETTLED_SECONDS = 5.0  # a file younger than this may still change within one timestamp
# The first version whose code makes of rows what today's does, and a count within it: raised when the same rows and
# settings become other tokens. Not the installed version: a run that is resumed after an upgrade has the same rows.
RENDERING = ("0.1.0", 2)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)
# Where data lies and where it is kept do not change what it becomes.
_IMMATERIAL = {"dataset_name_or_path", "dataset_config_name", "cache_dir"}


def cache_folder(section: DataSection) -> Path:
    """Where prepared sets are kept."""
    given = section.cache_dir or os.environ.get("SHARDTUNE_CACHE") or "~/.cache/shardtune"
    return Path(given).expanduser().absolute() / "prepared"


def settings_of(section: DataSection) -> dict[str, Any]:
    """The settings that decide what rows become; a chat template in a file counts by what it says."""
    settings = section.model_dump(mode="json", exclude=_IMMATERIAL)
    template = section.chat_template
    if template is not None and (path := Path(template).expanduser()).is_file():
        settings["chat_template"] = path.read_text(encoding="utf-8")
    return settings


def fingerprint(
    section: DataSection,
    seed: int,
    splits: Sequence[tuple[str, Split]],
    formats: Sequence[FormatChoice],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """The name under which a prepared set is kept: the same data and settings give the same name, wherever they lie.

    Args:
        splits: Every split that is read, with the side it is for.
        formats: What the rows of each source were found to be.
    """
    weights = [split.source.weight for side, split in splits if side == "train"]
    content = {
        "schema": SCHEMA,
        "version": list(RENDERING),
        "settings": settings_of(section),
        "data": [[side, _identity(split, cache_folder(section))] for side, split in splits],
        "formats": [[choice.name, choice.columns] for choice in formats],
        "weights": weights,
        "seed": seed if any(weight % 1 for weight in weights) else None,  # draws rows for these only
        "tokenizer": tokenizer_identity(tokenizer),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which tokens a text becomes."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        parts = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # left behind by whoever called it last
            parts.pop(state, None)
    else:
        parts = {"vocabulary": tokenizer.get_vocab(), "settings": repr(sorted(tokenizer.init_kwargs.items()))}
    content = [type(tokenizer).__name__, parts, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def prepared_once(
    folder: Path, fill: Callable[[Path], None], usable: Callable[[Path], bool], waiting: Callable[[], None]
) -> bool:
    """Make `folder` exist, filled by exactly one of the processes that want it; whether it was there already.

    A process that is killed while it fills leaves a `.staging-` folder, which nobody reads and the next one removes;
    its lock goes with it. Those that wait look at the lock and the folder, and need nothing else of each other: they
    may wait for hours, on other machines that share the disk.

    Args:
        fill: Writes everything into the folder it is given.
        usable: Whether a folder is whole; one that is not is made again.
        waiting: Called now and then while another process is at work.
    """
    if usable(folder):
        return True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f"{folder.name}.lock", waiting) as alone:
            if usable(folder):  # made while we waited
                return True
            _publish(folder, fill, usable, alone=alone)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise UserInputError(
            f"Cannot write prepared data to '{folder.parent}'.",
            why=str(error),
            fix="Set data.cache_dir (or $SHARDTUNE_CACHE) to a writable folder with free space.",
        ) from error
    return False


@contextmanager
def _lock(file: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock; False where the disk knows no locks. The kernel frees it with the process, however that ends."""
    with file.open("a") as handle:
        while True:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    log.warning(
                        "%s: this file system has no locks; several processes may prepare the same data", file.parent
                    )
                    yield False
                    return
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            waiting()
            time.sleep(_POLL_SECONDS)
        yield True


def _publish(folder: Path, fill: Callable[[Path], None], usable: Callable[[Path], bool], *, alone: bool) -> None:
    """Stage → fill → fsync → rename."""
    if alone:
        for left in folder.parent.glob(f".staging-{folder.name}-*"):
            shutil.rmtree(left)
    staging = folder.parent / f".staging-{folder.name}-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        fill(staging)
        for file in [*staging.rglob("*"), staging]:
            fsync(file)
        if folder.exists() and not (not alone and usable(folder)):
            doomed = folder.parent / f"{staging.name}-old"
            folder.rename(doomed)  # a crash among its files must not leave half of it under its name
            shutil.rmtree(doomed)
        if not folder.exists():
            staging.rename(folder)
            fsync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _identity(split: Split, folder: Path) -> Any:
    if isinstance(split, FileSplit):
        return [split.ranges, [[file.kind, file.compression, _content(file, folder)] for file in split.files]]
    assert isinstance(split, TableSplit)
    return [split.table._fingerprint, len(split.table), str(split.table.features)]


def _content(file: DataFile, folder: Path) -> list[Any]:
    """Size and hash of what a file holds; of a URL, what its server says to tell versions apart."""
    if file.is_url:
        import fsspec

        system, path = fsspec.core.url_to_fs(file.name)
        return [file.name, system.ukey(path)]
    path = Path(file.name)
    stat = path.stat()
    look = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
    memory = folder / "hashes" / hashlib.sha256(look.encode()).hexdigest()[:32]
    remembered = stat.st_size >= _REMEMBERED and time.time() - stat.st_mtime > _SETTLED_SECONDS
    if remembered and memory.is_file() and len(known := memory.read_text(encoding="ascii")) == 64:
        return [stat.st_size, known]
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if remembered:
        _remember(memory, digest)
    return [stat.st_size, digest]


def _remember(memory: Path, digest: str) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        staging = memory.with_suffix(f".{uuid.uuid4().hex[:8]}")
        staging.write_text(digest, encoding="ascii")
        staging.replace(memory)
    except OSError as error:  # it only saves time
        log.info("the hash in %s is not cached: %s", memory, error)
