"""What is in an image, and what can be wrong with it? Boxes, and the problems of the files they come from."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_SHOWN = 10  # problems that a message lists
_OUTSIDE = 0.002  # of the image's side: what rounding may put a box beyond it, which is cut off

BadData = Literal["refuse", "skip"]


class DataError(ValueError):
    """The data cannot be used as it is; says which file and line."""


@dataclass(frozen=True)
class Box:
    """Attributes:
    corners: x1, y1, x2, y2 as shares of the image's width and height.
    label: From 1; 0 is the background's.
    is_crowd: Several objects in one box: not trained on, and neither right nor wrong in the evaluation.
    """

    corners: tuple[float, float, float, float]
    label: int
    is_crowd: bool = False


@dataclass(frozen=True)
class AnnotatedImage:
    """Attributes:
    size: Width and height by its annotations; None: not told.
    """

    name: str
    path: Path
    boxes: tuple[Box, ...]
    size: tuple[int, int] | None = None


@dataclass
class Problems:
    """What is wrong with the data: refused in one message, or counted and left out."""

    bad_data: BadData
    found: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, place: object, text: str) -> None:
        """`kind` in the plural, for counting: "missing images"."""
        self.kinds[kind] += 1
        if len(self.found) < _SHOWN:
            self.found.append(f"{place}: {text}")

    def check(self) -> None:
        """Raises DataError with the first of them, unless they are to be skipped."""
        if self.kinds and self.bad_data == "refuse":
            raise DataError(f"{self}\nCorrect the data, or leave out what is wrong: --bad-data skip.")

    def __str__(self) -> str:
        more = self.kinds.total() - len(self.found)
        lines = [f"Wrong in the data: {self.counts}", *(f"  {one}" for one in self.found)]
        return "\n".join(lines + ([f"  … {more} more"] if more else []))

    @property
    def counts(self) -> str:
        return ", ".join(f"{kind}: {count}" for kind, count in self.kinds.items())


@dataclass(frozen=True)
class Annotations:
    """Attributes:
    classes: Their names; the label of the first is 1.
    """

    images: tuple[AnnotatedImage, ...]
    classes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The same on every rank that reads the same, whatever folder the images are in."""
        rows = [[image.name, [[*box.corners, box.label] for box in image.boxes]] for image in self.images]
        return hashlib.sha256(json.dumps([self.classes, rows]).encode()).hexdigest()


class ImageFolder:
    """Finds images by the name that annotations give them: a path below the folder, a file name, or an id."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"There is no folder '{folder}' (--local-image-dir).")
        self.folder = folder
        self._paths: dict[str, list[Path]] = {}
        for path in sorted(_files(folder)):
            if path.suffix.lower() in _SUFFIXES:
                for name in (path.name, path.stem):
                    self._paths.setdefault(name, []).append(path)

    def find(self, name: str) -> Path | str:
        """The image's path, or what is wrong."""
        exact = self.folder / name
        if Path(name).suffix and exact.is_file():
            return exact
        found = self._paths.get(Path(name).name, [])
        if len(found) == 1:
            return found[0]
        if not found:
            return f"there is no image '{name}' in {self.folder}"
        return f"'{name}' may be {found[0]} or {found[1]}"


def read_text(file: Path) -> str:
    """Raises DataError if it is no text in UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not encoded in UTF-8 ({error.reason} at byte {error.start}).") from error


def _files(folder: Path) -> Iterator[Path]:
    """Of all folders below, also those that are links; each once, whatever links lead to it."""
    seen = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(root, file) for file in files)


def checked_box(
    corners: tuple[float, ...], label: int, is_crowd: bool, place: object, problems: Problems
) -> Box | None:
    """The box, or None and a problem. What rounding has put outside of the image is cut off."""
    x1, y1, x2, y2 = corners
    shown = f"({x1:g}, {y1:g}) to ({x2:g}, {y2:g}) of the image's width and height"
    if not all(math.isfinite(value) and -_OUTSIDE <= value <= 1 + _OUTSIDE for value in corners):
        problems.add("boxes outside of their image", place, f"the box is outside of its image: {shown}")
        return None
    x1, y1, x2, y2 = (min(max(value, 0.0), 1.0) for value in corners)
    if x2 <= x1 or y2 <= y1:
        problems.add("boxes without an area", place, f"the box has no area: {shown}")
        return None
    return Box((x1, y1, x2, y2), label, is_crowd)


def with_paths(
    boxes: Mapping[str, list[Box]],
    places: Mapping[str, object],
    folder: ImageFolder,
    problems: Problems,
    sizes: Mapping[str, tuple[int, int]] | None = None,
) -> Iterator[AnnotatedImage]:
    """The images that are there. One at a time: those beyond a limit are not looked up.

    Args:
        places: Where each image is named, for problems.
        sizes: What is told of its size, which is compared when it is opened.
    """
    for name, found in boxes.items():
        path = folder.find(name)
        if isinstance(path, str):
            problems.add("missing images", places[name], path)
        else:
            yield AnnotatedImage(name, path, tuple(found), (sizes or {}).get(name))
