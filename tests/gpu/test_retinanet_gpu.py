"""examples/retinanet on a GPU: torchvision's own operators, NCCL and gloo, and what the meters see of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from running import REPOSITORY, Command, events

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
pytest.importorskip("pycocotools")
operators = pytest.importorskip("operators", reason="PYTHONPATH=examples/retinanet is not set")
shapes = pytest.importorskip("shapes")


def test_nms_in_plain_pytorch_is_torchvisions() -> None:
    operators.load_operators()
    assert operators.are_compiled()
    from torchvision.ops import nms

    for seed, count in enumerate((0, 1, 50, 1000)):
        generator = torch.Generator().manual_seed(seed)
        boxes = torch.rand(count, 4, generator=generator) * 100
        boxes[:, 2:] = boxes[:, :2] + boxes[:, 2:] / 2
        scores = torch.rand(count, generator=generator)
        for threshold in (0.3, 0.5, 0.9):
            assert torch.equal(operators.nms(boxes, scores, threshold), nms(boxes, scores, threshold))


def test_nccl_and_gloo_train_the_same_on_the_gpu(
    shardtune: Command, environment: dict[str, str], tmp_path: Path
) -> None:
    environment["PYTHONPATH"] = f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"
    shapes.make_set(tmp_path / "shapes", train=16, val=4, image_size=128, seed=0)
    losses = {}
    for backend in ("nccl", "gloo"):
        done = shardtune(
            "run", "--nproc", 1, "--name", backend, "-o", f"train.output_dir={tmp_path}", "--",
            REPOSITORY / "examples" / "retinanet" / "train.py", "--local-image-dir", tmp_path / "shapes",
            "--cache-dir", tmp_path / "cache", "--image-size", 128, "--epochs", 1, "--debug-freq", 1,
            "--backend", backend, "--precision", "float32",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ", float32, cuda" in done.stdout
        run = tmp_path / backend
        losses[backend] = [e["values"]["loss"] for e in events(run, "metrics") if "loss" in e["values"]]
        assert events(run, "profile")[-1]["memory"]["peak"] > 1 << 28
        assert events(run, "usage")[-1]["gpu"]["memory_used"] > 1 << 28
    assert losses["gloo"] == pytest.approx(losses["nccl"], rel=0.02)
