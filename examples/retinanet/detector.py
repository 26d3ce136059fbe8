"""Which RetinaNet is trained? ResNet50-FPN, with the weights of a file or none, for these classes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from operators import load_operators
from torch import Tensor, nn

load_operators()
from torchvision.models import resnet50  # noqa: E402 - its operators come first
from torchvision.models.detection import RetinaNet  # noqa: E402
from torchvision.models.detection._utils import overwrite_eps  # noqa: E402
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor  # noqa: E402
from torchvision.models.detection.transform import GeneralizedRCNNTransform  # noqa: E402
from torchvision.ops.feature_pyramid_network import LastLevelP6P7  # noqa: E402
from torchvision.ops.misc import FrozenBatchNorm2d  # noqa: E402

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as for torchvision's weights
_CLASSIFIER = "head.classification_head.cls_logits"
_PRIOR = 0.01  # probability that an anchor of a new head is an object, as in the paper


class WeightsError(ValueError):
    """The file holds no weights of this model."""


@dataclass(frozen=True)
class BuiltModel:
    """Attributes:
    source: Where the weights come from and what became of the head, for people.
    """

    model: RetinaNet
    source: str


class NormalizeAndBatch(GeneralizedRCNNTransform):
    """RetinaNet's input: uint8 images that are resized already, so that only a quarter of the bytes goes to the GPU."""

    def normalize(self, image: Tensor) -> Tensor:
        return super().normalize(image.float() / 255)

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        return image, target


def build_model(num_classes: int, weights: Path | None, image_size: int) -> BuiltModel:
    """RetinaNet for `num_classes` classes; class 0 is the background's, as in COCO's 91.

    Weights of a file keep their batch statistics (frozen, as torchvision fine-tunes). Without weights there are none to
    keep, and a few images a rank are too few to estimate them: GroupNorm, which does not depend on the batch, so that
    any number of ranks computes the same.

    Args:
        weights: A state dict of torchvision's `retinanet_resnet50_fpn`, of its `resnet50`, or `final/model.pt` of
            an earlier run.

    Raises:
        WeightsError: it is another model's.
    """
    if weights is None:
        torch.manual_seed(0)  # the same on all ranks; DDP broadcasts rank 0's anyway
        return BuiltModel(_retinanet(num_classes + 1, image_size, _group_norm), "random, with GroupNorm")
    state = _read(weights)
    norm = FrozenBatchNorm2d if any(name.endswith(".running_mean") for name in state) else _group_norm
    torch.manual_seed(0)
    model = _retinanet(num_classes + 1, image_size, norm)
    if "fc.weight" in state or "layer4.0.conv1.weight" in state:
        backbone = {name: value for name, value in state.items() if not name.startswith("fc.")}
        _load(model.backbone.body, backbone, weights)
        return BuiltModel(model, f"backbone from {weights.name}, pyramid and heads random")
    if norm is FrozenBatchNorm2d:
        overwrite_eps(model, 0.0)  # what torchvision's COCO weights were trained with
    return BuiltModel(model, _load_retinanet(model, state, weights))


def _load_retinanet(model: RetinaNet, state: dict[str, Tensor], file: Path) -> str:
    own = model.state_dict()
    replaced = ""
    bias = state.get(f"{_CLASSIFIER}.bias")
    if bias is not None and bias.shape != own[f"{_CLASSIFIER}.bias"].shape:
        before = len(bias) * len(own[f"{_CLASSIFIER}.bias"])
        anchors = model.head.classification_head.num_anchors
        before, now = len(bias) // anchors, len(own[f"{_CLASSIFIER}.bias"]) // anchors
        for part in ("weight", "bias"):
            state[f"{_CLASSIFIER}.{part}"] = own[f"{_CLASSIFIER}.{part}"]
        replaced = f"; the head of {before} classes is replaced by a new one of {now} (background included)"
    _load(model, state, file)
    return f"{file.name}{replaced}"


def _retinanet(num_classes: int, image_size: int, norm: Any) -> RetinaNet:
    body = resnet50(weights=None, norm_layer=norm)
    trainable = 3 if norm is FrozenBatchNorm2d else 5  # early layers of pretrained weights stay, as in torchvision
    backbone = _resnet_fpn_extractor(body, trainable, returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256))
    model = RetinaNet(backbone, num_classes)
    model.transform = NormalizeAndBatch(image_size, image_size, list(_MEAN), list(_STD))
    nn.init.constant_(model.head.classification_head.cls_logits.bias, -math.log((1 - _PRIOR) / _PRIOR))
    return model


_group_norm = partial(nn.GroupNorm, 32)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise WeightsError(f"{file}: cannot be read as weights: {str(error).splitlines()[0]}") from error
    for inner in ("model", "state_dict"):  # as references of torchvision and others wrap it
        if isinstance(state, Mapping) and isinstance(state.get(inner), Mapping):
            state = state[inner]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"{file}: is not a state dict (tensors by name)")
    return {str(name).removeprefix("module."): value for name, value in state.items()}


def _load(module: nn.Module, state: Mapping[str, Tensor], file: Path) -> None:
    ignored = {name for name in state if name.endswith("num_batches_tracked")}
    try:
        module.load_state_dict({name: value for name, value in state.items() if name not in ignored})
    except RuntimeError as error:
        raise WeightsError(f"{file}: is not a RetinaNet ResNet50-FPN of torchvision. {error}") from error
