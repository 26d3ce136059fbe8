"""What does `eval-loss` evaluate? A request that goes from the command line to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardtune.errors import UserInputError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    adapter: As it was given; None evaluates the model as it is.
    as_json: The result on stdout is one JSON object, and everything else goes to stderr.
    """

    adapter: Path | None = None
    as_json: bool = False

    @property
    def arguments(self) -> list[str]:
        """The same as command-line arguments."""
        adapter = ["--adapter", str(self.adapter)] if self.adapter is not None else []
        return [*adapter, *(["--json"] if self.as_json else [])]


def adapter_folder(given: Path) -> Path:
    """The folder of an adapter: the given folder, or `final/` of the given run.

    Raises:
        UserInputError: neither contains a PEFT adapter.
    """
    for folder in (given.expanduser(), given.expanduser() / "final"):
        if (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_WEIGHTS).is_file():
            return folder
    exists = given.expanduser().is_dir()
    raise UserInputError(
        f"--adapter: '{given}' {'contains no adapter' if exists else 'does not exist'}.",
        why=f"An adapter is a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}." if exists else "",
        fix="Pass a run's folder, its final/, a checkpoint (checkpoints/step-…), or a PEFT adapter's folder.",
    )
