"""A small detection set without a download: circles, squares and triangles, with boxes as OpenImages CSV and COCO json.

python examples/retinanet/shapes.py --out data/shapes --train 320 --val 64 --image-size 128
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = {"/m/circle": "circle", "/m/square": "square", "/m/triangle": "triangle"}  # as OpenImages: label, name
_SMALLEST, _LARGEST = 0.22, 0.5  # of the image's side
_TRIES = 50  # to find a free place for a shape
_DRAWN_AT = 512  # pixels at least, and made smaller again: smooth edges


@dataclass(frozen=True)
class Shape:
    """Attributes:
    box: x1, y1, x2, y2 in pixels.
    """

    label: str
    box: tuple[float, float, float, float]


def make_set(out: Path, train: int, val: int, image_size: int, seed: int) -> None:
    """`out/train/*.jpg`, `out/validation/*.jpg`, `out/{train,validation}.{csv,json}` and `out/classes.csv`."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "classes.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(CLASSES.items())
    for split, count in (("train", train), ("validation", val)):
        folder = out / split
        folder.mkdir(exist_ok=True)
        shapes = {}
        for number in range(count):
            image, shapes[f"{split}-{number:05d}"] = _picture(random.Random(f"{seed}/{split}/{number}"), image_size)
            image.save(folder / f"{split}-{number:05d}.jpg", quality=95)
        _write_csv(out / f"{split}.csv", shapes, image_size)
        _write_coco(out / f"{split}.json", split, shapes, image_size)


def _picture(rng: random.Random, side: int) -> tuple[Image.Image, list[Shape]]:
    factor = -(-_DRAWN_AT // side)
    large = side * factor
    ground = [rng.randrange(256) for _ in range(3)]
    noise = Image.frombytes("L", (side, side), rng.randbytes(side * side)).convert("RGB").resize((large, large))
    image = Image.blend(Image.new("RGB", (large, large), tuple(ground)), noise, 0.1)
    draw = ImageDraw.Draw(image)
    shapes: list[Shape] = []
    for _ in range(rng.randint(1, 4)):
        box = _free_place(rng, side, [shape.box for shape in shapes])
        if box is None:
            break
        label = rng.choice(list(CLASSES))
        _draw(draw, label, [value * factor for value in box], _other_colour(rng, ground))
        shapes.append(Shape(label, box))
    return image.resize((side, side), Image.Resampling.BOX), shapes


def _free_place(
    rng: random.Random, side: int, taken: Iterable[tuple[float, ...]]
) -> tuple[float, float, float, float] | None:
    for _ in range(_TRIES):
        size = rng.uniform(_SMALLEST, _LARGEST) * side
        x, y = rng.uniform(0, side - size), rng.uniform(0, side - size)
        box = (x, y, x + size, y + size)
        if not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
            return tuple(round(value, 2) for value in box)
    return None


def _other_colour(rng: random.Random, ground: list[int]) -> tuple[int, ...]:
    while True:
        colour = tuple(rng.randrange(256) for _ in range(3))
        if sum(abs(a - b) for a, b in zip(colour, ground, strict=True)) > 200:
            return colour


def _draw(draw: ImageDraw.ImageDraw, label: str, box: list[float], colour: tuple[int, ...]) -> None:
    x1, y1, x2, y2 = box
    if label == "/m/circle":
        draw.ellipse(box, fill=colour)
    elif label == "/m/square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x1, y2), (x2, y2), ((x1 + x2) / 2, y1)], fill=colour)


def _write_csv(path: Path, shapes: dict[str, list[Shape]], side: int) -> None:
    """As OpenImages' boxes: normalised, one row each."""
    names = ("ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax", "IsGroupOf")
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(names)
        for image, found in shapes.items():
            for shape in found:
                x1, y1, x2, y2 = (f"{value / side:.6f}" for value in shape.box)
                rows.writerow((image, "drawn", shape.label, 1, x1, x2, y1, y2, 0))


def _write_coco(path: Path, split: str, shapes: dict[str, list[Shape]], side: int) -> None:
    ids = {label: number for number, label in enumerate(CLASSES, start=1)}
    images, boxes = [], []
    for number, (image, found) in enumerate(shapes.items(), start=1):
        images.append({"id": number, "file_name": f"{split}/{image}.jpg", "width": side, "height": side})
        for shape in found:
            x1, y1, x2, y2 = shape.box
            size = [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)]
            boxes.append(
                {"id": len(boxes) + 1, "image_id": number, "category_id": ids[shape.label], "bbox": size,
                 "area": round(size[2] * size[3], 2), "iscrowd": 0}
            )  # fmt: skip
    categories = [{"id": number, "name": CLASSES[label]} for label, number in ids.items()]
    parts = {"images": images, "annotations": boxes, "categories": categories}
    lines = [f'"{name}": [\n' + ",\n".join(json.dumps(one) for one in items) + "\n]" for name, items in parts.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/shapes"), help="folder to make (default: %(default)s)")
    parser.add_argument("--train", type=int, default=320, help="images to train on (default: %(default)s)")
    parser.add_argument("--val", type=int, default=64, help="images to validate on (default: %(default)s)")
    parser.add_argument("--image-size", type=int, default=128, help="side in pixels (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_set(args.out, args.train, args.val, args.image_size, args.seed)
    print(f"{args.train} + {args.val} images of {args.image_size} × {args.image_size} in {args.out}")


if __name__ == "__main__":
    main()
