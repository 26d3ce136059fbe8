"""What does the model see, in which order? The same for any number of ranks: everything random is a function of the
seed, the epoch and the image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from annotations import AnnotatedImage, Annotations, BadData, DataError, ImageFolder, Problems
from coco import read_coco
from image_cache import ImageCache
from openimages import read_class_names, read_openimages
from operators import load_operators
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Sampler

load_operators()
from torchvision import tv_tensors  # noqa: E402 - its operators come first
from torchvision.transforms import v2  # noqa: E402

Target = dict[str, Tensor]
Sample = tuple[Tensor, Target]


def read_annotations(
    file: Path,
    folder: ImageFolder,
    class_names: Path | None,
    classes: tuple[str, ...] | None,
    limit: int | None,
    bad_data: BadData,
) -> tuple[Annotations, Problems]:
    """What a file says of the images in a folder: COCO's if it is a .json, otherwise OpenImages'.

    Args:
        class_names: Of OpenImages' labels.
        classes: What is trained, if that is known already.
        limit: The first images of the file that can be used; None: all.

    Raises:
        DataError: something is wrong and not to be skipped, or nothing is left.
    """
    if not file.is_file():
        raise DataError(f"There is no file '{file}'.")
    problems = Problems(bad_data)
    if file.suffix == ".json":
        names, images = read_coco(file, folder, classes, problems)
    elif class_names is None:
        raise DataError(f"{file}: its labels have no names. Add --class-names class-descriptions-boxable.csv.")
    else:
        by_label = read_class_names(class_names)
        names = tuple(dict.fromkeys(by_label.values()))
        images = read_openimages(file, folder, by_label, problems)
    usable = tuple(islice(images, limit))
    problems.check()
    if not usable:
        raise DataError(f"{file}: has no image that can be used." + (f"\n{problems}" if problems.kinds else ""))
    return Annotations(usable, names), problems


class DetectionSet(Dataset[Sample]):
    """Resized images and their boxes in pixels, augmented if they are to be trained on.

    Its keys are (epoch, index): loader processes are told by them what is random, not by a state of their own.
    """

    def __init__(self, images: tuple[AnnotatedImage, ...], cache: ImageCache, *, augment: bool, seed: int = 0) -> None:
        self.images, self.cache, self.seed = images, cache, seed
        self.augmentation = _augmentation() if augment else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        image = self.images[index]
        with Image.open(self.cache.path(image.path)) as opened:
            pixels = torch.from_numpy(np.array(opened)).permute(2, 0, 1)  # (3, height, width), uint8
        height, width = pixels.shape[1:]
        scale = torch.tensor([width, height, width, height], dtype=torch.float32)
        corners = torch.tensor([box.corners for box in image.boxes], dtype=torch.float32).reshape(-1, 4) * scale
        target = {
            "boxes": tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width)),
            "labels": torch.tensor([box.label for box in image.boxes], dtype=torch.int64),
            "iscrowd": torch.tensor([box.is_crowd for box in image.boxes], dtype=torch.int64),
        }
        if self.augmentation is None:
            return pixels, {name: value.as_subclass(Tensor) for name, value in target.items()}
        trained = target["iscrowd"] == 0
        target = {name: tv_tensors.wrap(value[trained], like=value) for name, value in target.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(self.seed, epoch, image.name))
            pixels, target = self.augmentation(tv_tensors.Image(pixels), target)
        return pixels.as_subclass(Tensor), {name: value.as_subclass(Tensor) for name, value in target.items()}


def _augmentation() -> v2.Transform:
    return v2.Compose(
        [
            v2.RandomPhotometricDistort(p=0.5),
            v2.RandomHorizontalFlip(p=0.5),
            v2.ClampBoundingBoxes(),
            v2.SanitizeBoundingBoxes(min_size=1, labels_getter=_beside_boxes),
        ]
    )


def _beside_boxes(sample: Any) -> tuple[Tensor, ...]:
    """What has a row for each box, and loses those of boxes that are removed."""
    return sample[1]["labels"], sample[1]["iscrowd"]


def _seed(seed: int, epoch: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{epoch}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True)
class StepPlan:
    """How an epoch is divided into steps. A step is `world_size × accumulation` batches, each of one rank.

    Rank r's k-th batch is the same images in the same step for every division of the same effective batch, so that one
    process with 8 images sees what two with 4 see together. What is left of an epoch after the last whole step is not
    trained on in it; each epoch has another order.
    """

    images: int
    batch_size: int
    accumulation: int
    world_size: int
    seed: int

    @property
    def effective_batch(self) -> int:
        return self.batch_size * self.accumulation * self.world_size

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self.images // self.effective_batch

    def batches(self, rank: int, epoch: int, first_step: int) -> Iterator[list[tuple[int, int]]]:
        """Keys of this rank's batches of an epoch, from a step on."""
        order = torch.randperm(self.images, generator=torch.Generator().manual_seed(_seed(self.seed, epoch, "order")))
        for step in range(first_step, self.steps):
            images = order[step * self.effective_batch : (step + 1) * self.effective_batch].tolist()
            for part in range(self.accumulation):
                begin = (part * self.world_size + rank) * self.batch_size
                yield [(epoch, image) for image in images[begin : begin + self.batch_size]]


class TrainingBatches(Sampler[list[tuple[int, int]]]):
    """What this rank's loader reads, epoch after epoch without a pause between them."""

    def __init__(self, plan: StepPlan, rank: int, epochs: int) -> None:
        self.plan, self.rank, self.epochs = plan, rank, epochs
        self.first_step = 0  # of the run; another one where it is resumed

    def __len__(self) -> int:
        return (self.epochs * self.plan.steps - self.first_step) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, step = divmod(self.first_step, self.plan.steps)
        for number in range(epoch, self.epochs):
            yield from self.plan.batches(self.rank, number, step)
            step = 0


def evaluation_batches(images: int, batch_size: int, rank: int, world_size: int) -> list[list[tuple[int, int]]]:
    """Every image once, on one of the ranks."""
    mine = [(0, index) for index in range(rank, images, world_size)]
    return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]


def collate(samples: list[Sample]) -> tuple[list[Tensor], list[Target]]:
    """Images have different sizes: the model makes a batch of them on its device."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def to_device(batch: tuple[list[Tensor], list[Target]], device: torch.device) -> tuple[list[Tensor], list[Target]]:
    images, targets = batch

    def move(value: Tensor) -> Any:
        return value.to(device, non_blocking=True)

    return [move(image) for image in images], [{name: move(v) for name, v in target.items()} for target in targets]
