"""What does `eval-loss` evaluate? A request that goes from the command line to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.final import FINAL, damaged_final
from shardtune.checkpoint.manifest import NAME as MANIFEST
from shardtune.checkpoint.manifest import Damage, verify, verify_safetensors
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import UserInputError
from shardtune.run.folder import CHECKPOINTS

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


def refuse_damaged(adapter: Path) -> None:
    """Raise if the files of an adapter are not whole.

    Those of a run's checkpoint are compared with its checksums, the weights in `final/` with those of the checkpoint of
    their step.

    Raises:
        UserInputError: with the file, what is wrong with it, and which checkpoint to use instead.
    """
    damage = _damage(adapter)
    if damage is None:
        return
    in_run = next((above for above in (adapter.parent, adapter.parent.parent) if (above / CHECKPOINTS).is_dir()), None)
    intact = CheckpointStore(in_run / CHECKPOINTS, keep=None).newest_intact()[0] if in_run is not None else None
    raise UserInputError(
        f"The adapter '{adapter}' is damaged.",
        why=f"{damage}.",
        fix=f"Use the newest intact checkpoint of its run, step {intact}: {in_run / CHECKPOINTS / f'step-{intact:06d}'}"
        if in_run is not None and intact is not None
        else "Copy it again from where it was written"
        + (", or train again: its run has no intact checkpoint." if in_run is not None else "."),
    )


def _damage(adapter: Path) -> Damage | None:
    if (adapter / MANIFEST).is_file():
        found = (
            one for one in verify(adapter) if one.is_fatal and one.file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST)
        )
        return next(found, None)
    run = adapter.parent
    if adapter.name == FINAL and (run / CHECKPOINTS).is_dir():
        damaged = damaged_final(run, CheckpointStore(run / CHECKPOINTS, keep=None))
        return None if damaged is None or damaged.has_adapter else damaged.damages[0]
    return verify_safetensors(adapter, ADAPTER_WEIGHTS)


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
