"""Which step is `final/` of, and how does it become another checkpoint's? Without torch: files are copied."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from shardtune.checkpoint.manifest import Damage, compare_file, sha256_of, verify_safetensors
from shardtune.checkpoint.store import CheckpointStore, is_interrupted, publish, restore_interrupted
from shardtune.durable import NotPlainError, open_plain, read_plain, write_file
from shardtune.errors import ShardtuneError, UserInputError

FINAL = "final"
_SOURCE = "source.json"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ON_WRAPPER = "on-wrapper"  # checkpoint/wrapper.py writes it; importing that takes torch
_CHECKPOINTS = "checkpoints"  # run/folder.py names it
_MAPPING = "key_mapping.json"
_LONGEST_HEADER = 100 << 20  # bytes; the limit of safetensors itself


@dataclass(frozen=True)
class FinalSource:
    """Where the weights in `final/` come from.

    Attributes:
        step: Of training.
        eval_loss: At that step, where it was evaluated.
        metric: What it was chosen by; None: the run itself published it when it ended.
        value: Its value of that.
    """

    step: int
    eval_loss: float | None = None
    metric: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class DamagedFinal:
    """A `final/` that cannot be trusted as it is, and why."""

    damages: tuple[Damage, ...]

    @property
    def has_adapter(self) -> bool:
        """Whether the adapter is intact all the same; its form for the vision+text model can be made of it."""
        return all(damage.file not in (_WEIGHTS, _CONFIG) for damage in self.damages)

    def __str__(self) -> str:
        return f"{FINAL}/: " + "; ".join(map(str, self.damages))


def write_source(folder: Path, source: FinalSource) -> None:
    """Part of writing a final folder."""
    write_file(folder / _SOURCE, json.dumps(asdict(source), indent=1) + "\n")


def read_source(final: Path) -> FinalSource | None:
    """What a final folder says; None where there is none, or it does not say (written before shardtune 0.2)."""
    try:
        found = json.loads(read_plain(final / _SOURCE))
        loss, value = found.get("eval_loss"), found.get("value")
        return FinalSource(
            int(found["step"]),
            float(loss) if loss is not None else None,
            found.get("metric"),
            float(value) if value is not None else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def has_weights(final: Path) -> bool:
    """Whether the folder is there, with an adapter; `damaged_final` says whether that is intact."""
    return (final / _WEIGHTS).is_file()


def damaged_final(run: Path, store: CheckpointStore) -> DamagedFinal | None:
    """Everything that is wrong with the adapter in a run's `final/`; None if nothing is, or there is no `final/`.

    Its weights are compared with the checksum that the checkpoint of the same step has of them. Where there is no such
    checkpoint, their header says how long the file is. The settings have no checksum to go by: users adapt them.
    """
    final = run / FINAL
    if not final.is_dir():
        return None
    source = source_of(run, store)
    manifest = store.manifest(source.step) if source is not None else None
    known = manifest.files.get(_WEIGHTS) if manifest is not None else None
    found = [
        compare_file(final, _WEIGHTS, known) if known is not None else verify_safetensors(final, _WEIGHTS),
        _damage_of_config(final),
        verify_safetensors(final, f"{_ON_WRAPPER}/{_WEIGHTS}") if (final / _ON_WRAPPER).is_dir() else None,
    ]
    damages = tuple(damage for damage in found if damage is not None)
    return DamagedFinal(damages) if damages else None


def _damage_of_config(final: Path) -> Damage | None:
    try:
        is_object = isinstance(json.loads(read_plain(final / _CONFIG)), dict)
    except FileNotFoundError:
        return Damage(_CONFIG, "missing")
    except OSError as error:
        return Damage(_CONFIG, "unreadable", error.strerror or str(error))
    except ValueError:
        is_object = False
    return None if is_object else Damage(_CONFIG, "changed", "it is not a JSON object")


def source_of(run: Path, store: CheckpointStore) -> FinalSource | None:
    """The step that a run's `final/` is of: as it says, or that of the checkpoint with the same bytes of weights."""
    return read_source(run / FINAL) or _same_weights(run / FINAL, store)


def source_of_adapter(run: Path | None, adapter: Path, step: int | None) -> FinalSource | None:
    """What training step an adapter's weights are of; None where that is not known.

    Args:
        run: That the adapter lies in, if in any.
        step: Of the checkpoint, where it is one.
    """
    if run is None:
        return None
    store = CheckpointStore(run / _CHECKPOINTS, keep=None)
    if step is not None:
        manifest = store.manifest(step)
        return FinalSource(step, manifest.eval_loss if manifest is not None else None)
    return source_of(run, store) if adapter == run / FINAL else None


def weights_sha256(adapter: Path) -> str:
    """Which weights these are, whatever their folder is called."""
    return sha256_of(adapter / _WEIGHTS)


def _same_weights(final: Path, store: CheckpointStore) -> FinalSource | None:
    try:
        digest = sha256_of(final / _WEIGHTS)
    except OSError:
        return None
    for step in reversed(store.steps()):
        manifest = store.manifest(step)
        if manifest is not None and _WEIGHTS in manifest.files and manifest.files[_WEIGHTS].sha256 == digest:
            return FinalSource(step, manifest.eval_loss)
    return None


def can_be_replaced(run: Path) -> bool:
    """Whether a run has a `final/` whose weights can become another step's, or one that a crash moved aside.

    Weights that were deleted are written again; the tokenizer and the rest come from `final/` itself.
    """
    final = run / FINAL
    return has_weights(final) or any(final.glob("tokenizer*")) or is_interrupted(final)


def replace_final(run: Path, store: CheckpointStore, source: FinalSource) -> Path | None:
    """Make `final/` of a finished run that of another checkpoint, which was verified; the caller holds the run's lease.

    The new folder is complete and on the disk before it takes the place of the old one, by two renames; a crash between
    these leaves none, and the next call first puts the old one back. Tokenizer and whatever else is in `final/` are
    taken over; the adapter, its settings, and its form for the vision+text model are the checkpoint's.

    Returns:
        Where the earlier `final/` was kept, if its weights are intact, and in no intact checkpoint: they would be lost.

    Raises:
        UserInputError: it has links.
        OSError: the disk is full; the earlier `final/` is as it was.
    """
    final = run / FINAL
    restore_interrupted(final)
    kept = None
    same = _same_weights(final, store)  # as its manifest says: its own file may be damaged
    is_elsewhere = same is not None and not any(damage.is_fatal for damage in store.verify(same.step))
    damaged = damaged_final(run, store)
    if not is_elsewhere and (damaged is None or damaged.has_adapter):
        earlier = read_source(final)
        kept = _free_name(run / (f"{FINAL}-step-{earlier.step:06d}" if earlier else f"{FINAL}-earlier"))
        publish(kept, lambda folder: _copy_files(final, folder, without=frozenset()))

    def fill(folder: Path) -> None:
        replaced = {_WEIGHTS, _CONFIG, _SOURCE, f"{_ON_WRAPPER}/{_WEIGHTS}"}
        _copy_files(final, folder, without=replaced)
        with store.reading(source.step) as checkpoint:
            for name in (_WEIGHTS, _CONFIG):
                shutil.copyfile(checkpoint / name, folder / name)
            if (final / _ON_WRAPPER).is_dir():
                _write_renamed(checkpoint / _WEIGHTS, final / _ON_WRAPPER, folder / _ON_WRAPPER / _WEIGHTS)
        write_source(folder, source)

    publish(final, fill)
    return kept


def _free_name(folder: Path) -> Path:
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _copy_files(source: Path, target: Path, without: frozenset[str] | set[str]) -> None:
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_dir() and not path.is_symlink():
            (target / name).mkdir(exist_ok=True)
        elif name not in without:
            try:
                with open_plain(path) as file, (target / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
            except NotPlainError as error:
                raise UserInputError(
                    f"'{path}' is not a plain file.",
                    why=f"{FINAL}/ is copied, and a link could lead anywhere.",
                    fix="Replace it with the file itself, or remove it.",
                ) from error


def _write_renamed(weights: Path, on_wrapper: Path, target: Path) -> None:
    """The same tensors under the names that the vision+text model has for them, as in the earlier `on-wrapper/`."""
    mapping = json.loads(read_plain(on_wrapper / _MAPPING))["key_mapping"]
    expected: dict[str, object] | None = None
    if verify_safetensors(on_wrapper, _WEIGHTS) is None:
        with open_plain(on_wrapper / _WEIGHTS) as file:
            expected = _read_header(file)
    with open_plain(weights) as file:
        header = {_served_name(name, mapping): entry for name, entry in _read_header(file).items()}
        if expected is not None and header.keys() != expected.keys():
            raise ShardtuneError(
                f"The names in {on_wrapper / _WEIGHTS} do not follow from {on_wrapper / _MAPPING}.",
                why="One of the two was changed since the run wrote them.",
                fix=f"Remove {on_wrapper} if the model is not served as a vision+text model. {FINAL}/ is unchanged.",
            )
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
        with target.open("wb") as copy:
            copy.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(file, copy)


def _read_header(file: FileIO) -> dict[str, object]:
    """Of a safetensors file: 8 bytes with its length, then JSON; places in it count from its end."""
    length = int.from_bytes(file.read(8), "little")
    if length > _LONGEST_HEADER:
        raise ShardtuneError(f"'{file.name}' is not a safetensors file.", fix="Its run wrote one: restore it.")
    return dict(json.loads(file.read(length)))


def _served_name(name: str, mapping: Mapping[str, str]) -> str:
    for pattern, prefix in mapping.items():
        if found := re.match(pattern, name):
            return prefix + name[found.end() :]
    return name
