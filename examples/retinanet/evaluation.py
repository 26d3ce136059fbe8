"""How good are the boxes? Mean average precision over all images of all ranks, by torchmetrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from dataset import Sample, to_device
from operators import load_operators
from torch import nn
from world import World

load_operators()
from torchmetrics.detection import MeanAveragePrecision  # noqa: E402 - torchvision's operators come first

_LOGGED = {"map": "mAP", "map_50": "mAP@50", "map_75": "mAP@75", "mar_100": "mAR@100"}


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[list[Sample]], world: World, autocast: Any) -> dict[str, float]:
    """COCO's metrics by name, the same on every rank.

    Predictions go to rank 0 as they are: torchmetrics' own gathering needs the same number of images on every rank.
    """
    model.eval()
    found = []
    for batch in batches:
        images, _ = moved = to_device(batch, world.device)
        with autocast():
            outputs = model(images)
        found += [
            (
                {
                    name: value.float().cpu() if value.is_floating_point() else value.cpu()
                    for name, value in output.items()
                },
                target,
            )
            for output, target in zip(outputs, batch[1], strict=True)
        ]
        del moved
    gathered = world.gather(found)
    scores: dict[str, float] = {}
    if world.is_main:
        metric = MeanAveragePrecision(iou_type="bbox", sync_on_compute=False)
        metric.warn_on_many_detections = False  # COCO's metrics are of the best 100
        pairs = [pair for of_rank in gathered for pair in of_rank]
        metric.update([output for output, _ in pairs], [target for _, target in pairs])
        values = metric.compute()
        scores = {name: float(values[key]) for key, name in _LOGGED.items()}
    return world.share(scores)
