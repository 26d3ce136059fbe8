"""What is in OpenImages' CSV of boxes? A row for each box, in shares of the image; another file names the classes."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from annotations import AnnotatedImage, Box, DataError, ImageFolder, Problems, checked_box, read_text, with_paths

_COLUMNS = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax")


def read_class_names(file: Path) -> dict[str, str]:
    """Names by label (class-descriptions-boxable.csv); where there are names alone, they are their own labels."""
    rows = [row for row in csv.reader(read_text(file).splitlines()) if row and row[0].strip()]
    if rows and rows[0] == ["LabelName", "DisplayName"]:  # version 7 has a header
        rows = rows[1:]
    if not rows:
        raise DataError(f"{file}: names no class.")
    return {row[0].strip(): row[-1].strip() for row in rows}


def read_openimages(
    file: Path, folder: ImageFolder, names: Mapping[str, str], problems: Problems
) -> Iterator[AnnotatedImage]:
    """Images in the file's order. One whose boxes all have problems is left out: it would teach that nothing is there.

    Raises:
        DataError: it has not the columns of such a file, or no rows.
    """
    classes = list(dict.fromkeys(names.values()))
    labels = {label: 1 + classes.index(name) for label, name in names.items()}
    boxes: dict[str, list[Box]] = {}
    places: dict[str, str] = {}  # of an image's first row
    for line, row in _rows(file):
        place = f"{file}:{line}"
        image = str(row["ImageID"])
        places.setdefault(image, place)
        box = _box(row, labels, place, problems)
        if box is not None:
            boxes.setdefault(image, []).append(box)
    if not places:
        raise DataError(f"{file}: has no rows.")
    return with_paths(boxes, places, folder, problems)


def _rows(file: Path) -> Iterator[tuple[int, Mapping[str, str | None]]]:
    """Each with its line."""
    with file.open(newline="", encoding="utf-8-sig") as source:
        rows = csv.DictReader(source)
        try:
            missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                what = f"has no column {', '.join(missing)}" if rows.fieldnames else "is empty"
                raise DataError(f"{file}:1: {what}. A file of OpenImages' boxes has {', '.join(_COLUMNS)}.")
            for row in rows:
                yield rows.line_num, row
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{file}:{rows.line_num + 1}: is no CSV in UTF-8: {error}.") from error


def _box(row: Mapping[str, str | None], labels: Mapping[str, int], place: str, problems: Problems) -> Box | None:
    try:
        corners = tuple(float(row[name] or "") for name in ("XMin", "YMin", "XMax", "YMax"))
    except ValueError:
        values = ", ".join(f"{name} {row[name]!r}" for name in _COLUMNS[2:])
        problems.add("boxes without four numbers", place, f"a box is four numbers; this has {values}")
        return None
    if row["LabelName"] not in labels:
        problems.add("boxes of unknown classes", place, f"the class '{row['LabelName']}' is not in --class-names")
        return None
    is_crowd = (row.get("IsGroupOf") or "").strip() == "1"
    return checked_box(corners, labels[row["LabelName"]], is_crowd, place, problems)
