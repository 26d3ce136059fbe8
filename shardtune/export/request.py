"""What is to be exported, and what came of it? The types between the command line, the targets and the model card."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from shardtune.inference.source import TunedModel

TargetName = Literal["merged", "adapter", "gguf", "vllm", "sglang"]
Dtype = Literal["bf16", "fp16", "fp32", "fp8"]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(given: str) -> int:
    """Bytes of `5GB`, `500MiB`.

    Raises:
        UserInputError: it is not written so.
    """
    found = _SIZE.fullmatch(given.strip())
    if found is None or not float(found[1]):
        raise UserInputError(f"--max-shard-size {given} is not a size.", fix="Write it like 5GB or 500MB.")
    return int(float(found[1]) * (1024 if "i" in found[2] else 1000) ** _UNITS[found[2][0]])


@dataclass(frozen=True)
class ExportRequest:
    """What the user asked for.

    Attributes:
        out: Where the result will appear; targets write to the folder that they are given, which is renamed to it.
        dtype: None: the target's default.
        max_shard_bytes: Of each safetensors file; None: the target's default.
        min_surviving_delta: The share of the fine-tuning that rounding has to leave; None: the target's default.
        quantization: Of a GGUF file; None: none.
        base_name: What the Hub calls the base model; None: what can be found out.
    """

    tuned: TunedModel
    target: TargetName
    out: Path
    dtype: Dtype | None = None
    max_shard_bytes: int | None = None
    min_surviving_delta: float | None = None
    quantization: str | None = None
    base_name: str | None = None


@dataclass(frozen=True)
class Verification:
    """What was proven of the written files before they were published.

    Attributes:
        method: In a few words, for JSON: `logits`, `weights`, `deltas`, `tensors` (docs/export.md).
        text: What was compared, with the numbers, for people and the model card.
        figures: The same numbers by name.
    """

    method: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CardParts:
    """What a target adds to the model card.

    Attributes:
        library: `library_name` for the Hub: transformers, peft, gguf …
        usage: Markdown: how to load or serve the result. `{folder}` stands for where it is.
        tags: For the Hub.
        contents: Markdown: what was written and how, in a sentence or two.
        serve: The command that starts a server with the result where it is now; not for the card, but for JSON.
    """

    library: str
    usage: str
    tags: tuple[str, ...] = ()
    contents: str = ""
    serve: str | None = None


class ExportLog(Protocol):
    """Where a target says what happens."""

    warnings: list[str]

    def say(self, label: str, text: str) -> None:
        """One line for people."""

    def warn(self, text: str) -> None:
        """A line that also goes into the result and the model card."""

    def progress(self, done: int, total: int) -> None:
        """Bytes of the current phase."""


class Export(Protocol):
    """One target's plan for one model. When it exists, everything that can be refused beforehand has been."""

    @property
    def nbytes(self) -> int:
        """About how much will be written: disk space is checked against it."""

    def write(self, folder: Path, log: ExportLog) -> None:
        """Write everything but the model card into `folder`, which is empty."""

    def verify(self, folder: Path, log: ExportLog) -> Verification:
        """Read back what was written. Raises ShardtuneError where it is not what it should be: nothing is published."""

    def card(self) -> CardParts:
        """For the model card (README.md), which is written last."""


@dataclass(frozen=True)
class ExportResult:
    """What is in `out` now.

    Attributes:
        serve: The command that starts a server with it, for the targets vllm and sglang.
    """

    out: Path
    target: TargetName
    nbytes: int
    files: tuple[str, ...]
    verification: Verification
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    serve: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.out),
            "target": self.target,
            "bytes": self.nbytes,
            "files": list(self.files),
            "verified": self.verification.method,
            "verification": {"text": self.verification.text, **self.verification.figures},
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 1),
            **({"serve": self.serve} if self.serve is not None else {}),
        }


def default_out(tuned: TunedModel, target: TargetName) -> Path:
    """In the run's folder, or beside an adapter outside of any run."""
    if tuned.run is not None:
        name = target if tuned.step is None else f"{target}-step-{tuned.step:06d}"
        return tuned.run / "export" / name
    return tuned.adapter.with_name(f"{tuned.adapter.name}-{target}")
