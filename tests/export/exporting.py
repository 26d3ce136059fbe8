"""Exports without a command line, and what was printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from shardtune.export.request import ExportRequest, ExportResult, TargetName
from shardtune.export.run import export_model
from shardtune.inference.source import find_tuned


class Quiet:
    """An `ExportLog` that keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.lines: list[str] = []

    def say(self, label: str, text: str) -> None:
        self.lines.append(f"{label} {text}")

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def progress(self, done: int, total: int) -> None:
        assert 0 < done <= total


def export(
    adapter: Path, out: Path, target: TargetName = "merged", *, base: Path | None = None, **options: Any
) -> ExportResult:
    tuned = find_tuned(str(adapter), base=str(base) if base is not None else None)
    return export_model(ExportRequest(tuned, target, out, **options), Quiet())


def tensors_of(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, as plain safetensors reads it."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))
