"""What can a script tell, in two lines? `from shardtune import observe`; docs/run.md.

    for images, targets in observe.steps(loader, samples=lambda batch: len(batch[0]), unit="images"):
        ...
        observe.log(loss=loss.item())

Without `shardtune run` every function does nothing, so the same script runs under plain python or torchrun.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardtune.observe.profile_window import profile_line as line_of

if TYPE_CHECKING:
    from shardtune.observe.session import Session

Batch = TypeVar("Batch")
_current: Session | None = None


def install(session: Session | None) -> None:
    """Make it the one that these functions speak to."""
    global _current
    _current = session


def run_dir() -> Path | None:
    """The run's folder; None without `shardtune run`."""
    return _current.folder if _current is not None else None


def steps(
    batches: Iterable[Batch],
    *,
    samples: Callable[[Batch], int] | None = None,
    unit: str = "samples",
    accumulation: int = 1,
) -> Iterator[Batch]:
    """Iterate over `batches` and time each step: what it took, and how much of that was waiting for data.

    A step is `accumulation` batches, as is one optimizer step; the last one of a loop may have fewer. Where the loop is
    left with `break`, the step it is left in counts.

    Args:
        samples: How many samples a batch has, for samples per second.
        unit: What a sample is called, in the plural: images, tokens, clips.
    """
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ValueError(f"accumulation is {accumulation!r}; it is a number of batches, 1 or more")
    return iter(batches) if _current is None else _current.steps(batches, samples, unit, accumulation)


def current_step() -> int:
    """Inside of the loop over `steps` the number of the step it is in, from 1; outside, of steps completed."""
    return _current.step if _current is not None else 0


def log(**values: Any) -> None:
    """Numbers of the current step, for the report: `observe.log(loss=0.3, **{"val/mAP@50": 0.4})`.

    A tensor with one element is read, which waits for the GPU.

    Raises:
        TypeError: a value is no number.
    """
    found = {name: _number(name, value) for name, value in values.items()}
    if _current is not None and found:
        _current.events.write("metrics", step=_current.step, values=found)


def phase(doing: str) -> AbstractContextManager[None]:
    """`with observe.phase("evaluating"):` time that belongs to no step; a message about a hang says it."""
    return _current.phase(doing) if _current is not None else nullcontext()


def stop_requested() -> bool:
    """Whether the run was asked to stop (SIGTERM, SIGUSR1, Ctrl-C): save, and return from the script.

    All ranks have to ask at the same place: they agree on the answer. From the first call on a signal no longer ends
    the process. A script that ends after the answer was True has exit code 75 (130 after Ctrl-C).
    """
    return _current is not None and _current.follower.stop_requested()


def save_checkpoint(fill: Callable[[Path], None], *, keep: int | None = 2, **about: Any) -> Path | None:
    """Write a checkpoint of the current step: whole or not at all, with checksums, as `shardtune train` does.

    Every rank may call it; rank 0 writes, and the others return None at once.

    Args:
        fill: Writes the files into the folder it is given.
        keep: How many checkpoints stay; None: all.
        about: Facts for its manifest (JSON). The one with the lowest `eval_loss` stays beyond `keep`.
    """
    return _current.save(fill, keep, about) if _current is not None else None


def load_checkpoint(run: Path | None = None) -> tuple[int, Path] | None:
    """Step and folder of the newest intact checkpoint, the same on every rank; steps are counted from there.

    All ranks have to call it. None if there is none.

    Args:
        run: The folder of another run; None: this one.
    """
    return _current.load(run) if _current is not None else None


def profile() -> str:
    """The medians of the last steps on one line, such as `profile 40  1.2 s/step  data 3%  26 images/s/rank`; empty
    without any."""
    if _current is None or not len(_current.profiles):
        return ""
    return line_of(_current.profiles, None)


def _number(name: str, value: Any) -> float | int:
    if hasattr(value, "item") and not isinstance(value, numbers.Number):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise TypeError(f"observe.log: {name} has more than one element") from error
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"observe.log: {name} is {type(value).__name__}, not a number")
    number = float(value)
    return int(number) if isinstance(value, numbers.Integral) and math.isfinite(number) else number
