"""Has the validation loss stopped improving?"""

from __future__ import annotations

import math
from typing import Any


class EarlyStopping:
    """Counts evaluations in a row that were not better than the best one by more than `min_improvement`.

    The best loss moves only by such an improvement, so that many small ones add up. A loss that is NaN or infinite is
    never an improvement.
    """

    def __init__(self, patience: int, min_improvement: float) -> None:
        self.patience, self.min_improvement = patience, min_improvement
        self.best_loss: float | None = None
        self.best_step = 0
        self.last_step = -1
        self.without_improvement = 0

    def update(self, step: int, eval_loss: float) -> bool:
        """Whether to stop now. A step that was evaluated before (a resumed run may do it again) counts once."""
        if step <= self.last_step:
            return self.should_stop
        self.last_step = step
        if math.isfinite(eval_loss) and (self.best_loss is None or self.best_loss - eval_loss > self.min_improvement):
            self.best_loss, self.best_step, self.without_improvement = eval_loss, step, 0
        else:
            self.without_improvement += 1
        return self.should_stop

    @property
    def should_stop(self) -> bool:
        return self.without_improvement >= self.patience

    @property
    def reason(self) -> str:
        evaluations = f"{self.without_improvement} evaluation{'s' if self.without_improvement > 1 else ''}"
        if self.best_loss is None:
            return f"validation loss was NaN or infinite in {evaluations}"
        by = f" by more than {self.min_improvement:g}" if self.min_improvement else ""
        return (
            f"validation loss did not improve{by} in {evaluations} "
            f"(last improvement: {self.best_loss:.4f} at step {self.best_step})"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON; patience and threshold are the config's."""
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "last_step": self.last_step,
            "without_improvement": self.without_improvement,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]
        self.last_step, self.without_improvement = state["last_step"], state["without_improvement"]
