"""Can torchvision be imported? Its compiled operators, or a plain PyTorch `nms` where they do not load."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_NAMES = (
    "nms",
    "qnms",
)  # those that `import torchvision` looks up; the second, for quantized boxes, has nothing behind it
_library: torch.library.Library | None = None  # an operator lives as long as this


def load_operators() -> None:
    """Call it before the first import of torchvision.

    torchvision's wheels are built for CUDA. Beside a CPU-only torch their library does not load, and `import
    torchvision` ends with "operator torchvision::nms does not exist". RetinaNet needs no other operator than this one.

    Raises:
        RuntimeError: they do not load on a machine with GPUs, where the slow one would go unnoticed.
    """
    global _library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise RuntimeError("torchvision is not installed: pip install -c constraints.txt -e '.[vision]'")
    if _library is not None or "torchvision" in sys.modules:
        return
    try:
        for file in Path(spec.origin).parent.glob("_C.*"):
            torch.ops.load_library(str(file))
            return
        reason = "its library is missing"
    except OSError as error:
        reason = str(error)
    if torch.cuda.is_available():
        raise RuntimeError(f"torchvision does not fit this torch ({torch.__version__}): {reason}")
    _library = torch.library.Library("torchvision", "DEF")
    for name in _NAMES:
        _library.define(f"{name}{_SCHEMA}")
    _library.impl("nms", nms, "CPU")
    import torchvision.extension

    torchvision.extension._has_ops = lambda: True  # asked by torchvision.ops.nms before each call


def are_compiled() -> bool:
    """Whether torchvision's own operators run."""
    return _library is None


def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """What `torchvision.ops.nms` computes: indices of the boxes that are kept, the best first.

    Args:
        boxes: (N, 4) as x1, y1, x2, y2.
        scores: (N,)
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    left = torch.arange(len(order))
    kept = []
    while len(left):
        best, rest = left[0], left[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[rest, :2])
        high = torch.minimum(boxes[best, 2:], boxes[rest, 2:])
        shared = (high - low).clamp(min=0).prod(dim=1)
        left = rest[shared / (area[best] + area[rest] - shared) <= iou_threshold]
    return order[torch.stack(kept)] if kept else order
