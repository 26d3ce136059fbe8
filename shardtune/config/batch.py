"""How many rows does an optimizer step take? From the settings and the number of processes alone."""

from __future__ import annotations

from shardtune.config.schema import TrainSection
from shardtune.errors import UserInputError

ROWS_PER_PROCESS = 8  # of a step, where nothing is said about it
_SIZE, _BATCH, _ACCUMULATION = (
    "train.effective_batch_size",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
)


def rows_per_process(train: TrainSection, processes: int) -> int:
    """Rows that each process takes in an optimizer step.

    Raises:
        UserInputError: `train.effective_batch_size` cannot be divided among the processes, or contradicts what else is
            given.
    """
    batch, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    size = train.effective_batch_size
    if size is None:
        default = ROWS_PER_PROCESS if batch == "auto" else batch
        return default * (1 if accumulation == "auto" else accumulation)
    if size % processes:
        below = size - size % processes
        sizes = " or ".join(str(n) for n in (below, below + processes) if n)
        raise UserInputError(
            f"{_SIZE} is {size}, which {processes} processes cannot divide evenly.",
            fix=f"Set it to {sizes}, or use a number of processes that divides {size}.",
        )
    rows = size // processes
    given = {name: value for name, value in ((_BATCH, batch), (_ACCUMULATION, accumulation)) if value != "auto"}
    product = 1
    for value in given.values():
        product *= value
    if rows % product or (len(given) == 2 and rows != product):
        named = " and ".join(f"{name}: {value}" for name, value in given.items())
        first, *others = given
        fix = f"Set {first} to a divisor of {rows}, or leave it out: auto chooses one."
        if others and rows % given[first] == 0:
            fix = f"Set {others[0]}: {rows // given[first]}, or leave it out: auto computes it."
        raise UserInputError(
            f"{_SIZE} is {size}, which {named} on {processes} process{'es' * (processes > 1)} cannot make.",
            why=f"That is {rows} rows per process and step; per device × accumulation must be exactly that.",
            fix=fix,
        )
    return rows


def effective_batch(train: TrainSection, processes: int) -> int:
    """Rows of all processes in an optimizer step.

    Raises:
        UserInputError: as `rows_per_process`.
    """
    return rows_per_process(train, processes) * processes
