"""examples/retinanet: operators, weights and scores."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import operators
import pytest
import torch
from detector import WeightsError, build_model
from evaluation import evaluate
from world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"), None)


def test_nms_keeps_what_a_loop_over_pairs_keeps() -> None:
    def overlap(a: list[float], b: list[float]) -> float:
        width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        shared = max(width, 0) * max(height, 0)
        return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)

    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        boxes = torch.rand(60, 4, generator=generator, dtype=torch.float64) * 50
        boxes[:, 2:] = boxes[:, :2] + 5 + boxes[:, 2:]
        scores = torch.rand(60, generator=generator)
        kept: list[int] = []
        for index in sorted(range(60), key=lambda i: -scores[i]):
            if all(overlap(boxes[index].tolist(), boxes[other].tolist()) <= 0.5 for other in kept):
                kept.append(index)
        assert operators.nms(boxes, scores, 0.5).tolist() == kept
    assert operators.nms(torch.empty(0, 4), torch.empty(0), 0.5).tolist() == []


@pytest.fixture(scope="module")
def coco_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The names and shapes of torchvision's COCO weights, which have 91 classes; random numbers."""
    from torchvision.models.detection import retinanet_resnet50_fpn
    from torchvision.ops.misc import FrozenBatchNorm2d

    torch.manual_seed(7)
    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in model.modules())
    file = tmp_path_factory.mktemp("weights") / "coco.pth"
    torch.save(model.state_dict(), file)
    return file


def test_weights_of_coco_get_a_new_head_for_other_classes_and_keep_the_rest(coco_weights: Path) -> None:
    built = build_model(3, coco_weights, 64)
    assert "the head of 91 classes is replaced by a new one of 4 (background included)" in built.source
    given, loaded = torch.load(coco_weights), built.model.state_dict()
    replaced = {name for name, value in loaded.items() if not torch.equal(value, given[name])}
    assert {name.rpartition(".")[0] for name in replaced} == {"head.classification_head.cls_logits"}
    assert "replaced" not in build_model(90, coco_weights, 64).source


def test_frozen_statistics_are_used_as_they_are(coco_weights: Path) -> None:
    from torchvision.ops.misc import FrozenBatchNorm2d

    model = build_model(3, coco_weights, 64).model
    norms = [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)]
    assert len(norms) == 53 and all(norm.eps == 0.0 for norm in norms), "as torchvision's loader sets it"
    assert (
        not model.backbone.body.conv1.weight.requires_grad and model.backbone.body.layer4[0].conv1.weight.requires_grad
    )


def test_a_backbones_weights_are_enough(tmp_path: Path) -> None:
    from torchvision.models import resnet50

    weights = resnet50(weights=None).state_dict()
    torch.save(weights, tmp_path / "resnet50.pth")
    built = build_model(3, tmp_path / "resnet50.pth", 64)
    assert "pyramid and heads random" in built.source
    assert torch.equal(built.model.backbone.body.layer4[2].conv3.weight, weights["layer4.2.conv3.weight"])


def test_weights_of_an_earlier_run_are_taken_with_their_norm(tmp_path: Path) -> None:
    first = build_model(3, None, 64).model
    torch.save(first.state_dict(), tmp_path / "model.pt")
    again = build_model(3, tmp_path / "model.pt", 64)
    assert "replaced" not in again.source
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in again.model.state_dict().items())


@pytest.mark.parametrize("content", [b"no weights", {"other.weight": torch.zeros(2)}, [1, 2]])
def test_another_file_is_refused_with_its_name(tmp_path: Path, content: object) -> None:
    file = tmp_path / "wrong.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(WeightsError, match=r"wrong\.pth"):
        build_model(3, file, 64)


def test_scores_are_those_of_the_boxes() -> None:
    class Knows(torch.nn.Module):
        """Finds what it is told, on images that are numbered by their pixels."""

        def __init__(self, shift: float) -> None:
            super().__init__()
            self.shift = shift

        def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            return [
                {"boxes": truth(int(image[0, 0, 0]))["boxes"] + self.shift, "labels": torch.tensor([1]),
                 "scores": torch.tensor([0.9])}
                for image in images
            ]  # fmt: skip

    def truth(number: int) -> dict[str, torch.Tensor]:
        box = torch.tensor([[10.0 + number, 10.0, 40.0 + number, 40.0]])
        return {"boxes": box, "labels": torch.tensor([1]), "iscrowd": torch.tensor([0])}

    images = [torch.full((3, 60, 60), number, dtype=torch.uint8) for number in range(4)]
    batches = [(images[:2], [truth(0), truth(1)]), (images[2:], [truth(2), truth(3)])]
    assert evaluate(Knows(0), batches, ALONE, nullcontext) == pytest.approx(
        {"mAP": 1, "mAP@50": 1, "mAP@75": 1, "mAR@100": 1}
    )
    shifted = evaluate(Knows(3), batches, ALONE, nullcontext)
    assert shifted["mAP@50"] == pytest.approx(1) and shifted["mAP@75"] == 0 and 0 < shifted["mAP"] < 1
