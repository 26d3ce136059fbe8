"""What is in a COCO json of instances? Images, annotations in pixels, and the names of their categories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annotations import AnnotatedImage, Box, DataError, ImageFolder, Problems, checked_box, read_text, with_paths

_PARTS = ("images", "annotations", "categories")


@dataclass(frozen=True)
class _Place:
    """An item of one of the file's lists; its line is looked up when it is shown."""

    file: Path
    text: str
    part: str
    index: int

    def __str__(self) -> str:
        start = re.search(rf'"{self.part}"\s*:\s*\[', self.text)
        position, decoder = start.end() if start else 0, json.JSONDecoder()
        for _ in range(self.index):
            _, position = decoder.raw_decode(self.text, self._next(position))
        line = self.text.count("\n", 0, self._next(position)) + 1
        return f"{self.file}:{line} ({self.part}[{self.index}])"

    def _next(self, position: int) -> int:
        """Where the item at or behind a position begins."""
        found = re.compile(r"[\s,]*").match(self.text, position)
        return found.end() if found else position


def read_coco(
    file: Path, folder: ImageFolder, classes: Sequence[str] | None, problems: Problems
) -> tuple[tuple[str, ...], Iterator[AnnotatedImage]]:
    """The classes, and the images in the file's order; one without annotations is an example of nothing to find.

    Args:
        classes: What is trained, if that is known: another category is a problem. None: the file's own.

    Raises:
        DataError: it is no such file, or has no images.
    """
    text = read_text(file)
    content = _content(file, text)
    categories = {one.get("id"): str(one.get("name")) for one in sorted(content["categories"], key=_id)}
    names = tuple(classes if classes is not None else dict.fromkeys(categories.values()))
    labels = {key: 1 + names.index(name) for key, name in categories.items() if name in names}
    images: dict[Any, Mapping[str, Any]] = {}
    boxes: dict[str, list[Box]] = {}
    places: dict[str, object] = {}
    for index, image in enumerate(content["images"]):
        place = _Place(file, text, "images", index)
        if not isinstance(image.get("file_name"), str) or not _is_size(image.get("width"), image.get("height")):
            problems.add("images without a size or a name", place, f"no file_name, width and height: {_short(image)}")
        elif image["file_name"] in boxes or image.get("id") in images:
            problems.add("images that are there twice", place, f"there was one before: {_short(image)}")
        else:
            images[image.get("id")] = image
            boxes[image["file_name"]], places[image["file_name"]] = [], place
    unsound = set()
    for index, annotation in enumerate(content["annotations"]):
        place = _Place(file, text, "annotations", index)
        image = images.get(annotation.get("image_id"))
        if image is None:
            problems.add("boxes of unknown images", place, f"no image has the id {annotation.get('image_id')!r}")
            continue
        box = _box(annotation, image, categories, labels, place, problems)
        if box is not None:
            boxes[image["file_name"]].append(box)
        else:
            unsound.add(image["file_name"])
    sound = {name: found for name, found in boxes.items() if found or name not in unsound}
    sizes = {image["file_name"]: (image["width"], image["height"]) for image in images.values()}
    return names, with_paths(sound, places, folder, problems, sizes)


def _content(file: Path, text: str) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{file}: is no JSON: {error}.") from error
    for part in _PARTS:
        items = content.get(part) if isinstance(content, dict) else None
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise DataError(f"{file}: has no list of '{part}'. COCO's instances have {', '.join(_PARTS)}.")
    for part in ("images", "categories"):
        if not content[part]:
            raise DataError(f"{file}: its list of {part} is empty.")
    return dict(content)


def _box(
    annotation: Mapping[str, Any],
    image: Mapping[str, Any],
    categories: Mapping[Any, str],
    labels: Mapping[Any, int],
    place: _Place,
    problems: Problems,
) -> Box | None:
    category, pixels = annotation.get("category_id"), annotation.get("bbox")
    if category not in labels:
        named = f"'{categories[category]}'" if category in categories else f"id {category!r}"
        problems.add("boxes of unknown classes", place, f"the class {named} is none of those that are trained")
        return None
    if not isinstance(pixels, list) or len(pixels) != 4 or not all(isinstance(v, int | float) for v in pixels):
        problems.add("boxes without four numbers", place, f"a bbox is [x, y, width, height]; this is {pixels!r}")
        return None
    x, y, width, height = pixels
    w, h = image["width"], image["height"]
    corners = (x / w, y / h, (x + width) / w, (y + height) / h)
    return checked_box(corners, labels[category], annotation.get("iscrowd") == 1, place, problems)


def _is_size(width: object, height: object) -> bool:
    return all(isinstance(value, int | float) and value > 0 for value in (width, height))


def _id(category: Mapping[str, Any]) -> tuple[str, Any]:
    key = category.get("id")
    return type(key).__name__, key if isinstance(key, int | str) else 0


def _short(item: object) -> str:
    text = json.dumps(item)
    return text if len(text) <= 100 else f"{text[:99]}…"
