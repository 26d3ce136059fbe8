"""Does the curve look like learning? Loss and gradient norm against the steps before, by median and MAD. No torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from shardtune.config.schema import GuardsSection
from shardtune.train.guards.alarm import Alarm

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_RISE = 0.3  # nats; below that a rise of a small loss is noise, however large its ratio
_BEGINNING = 10  # steps whose median is "where the run began" for a loss that should fall
_FLAT_CHECKS = 5  # how often a flat loss is checked for, a window apart


class Window:
    """The last values with their steps, and how far from the others a new one is."""

    def __init__(self, size: int, values: Iterable[tuple[int, float]] = ()) -> None:
        self.values: deque[tuple[int, float]] = deque(((int(s), float(v)) for s, v in values), maxlen=size)

    @property
    def is_full(self) -> bool:
        return len(self.values) == self.values.maxlen

    @property
    def has_enough(self) -> bool:
        """Enough values to judge another one by."""
        assert self.values.maxlen is not None
        return len(self.values) >= max(8, self.values.maxlen // 2)

    @property
    def median(self) -> float:
        return statistics.median(value for _, value in self.values)

    def limit(self, z: float, ratio: float) -> float:
        """Above it a value is a spike: by `z` robust deviations, and by `ratio` (deviations may be close to zero)."""
        median = self.median
        mad = statistics.median(abs(value - median) for _, value in self.values)
        return max(median + z * _MAD_TO_SIGMA * mad, median * ratio)

    def add(self, step: int, value: float) -> None:
        self.values.append((step, value))


class Curve:
    """Judges a run's loss and gradient norm. The same values give the same verdicts, whenever it was interrupted.

    A step is judged (`spike`) before it is accepted: one that is left out never becomes part of what others are
    compared with. `trend` judges what was accepted.
    """

    def __init__(self, settings: GuardsSection) -> None:
        self.settings = settings
        self.losses, self.norms = Window(settings.window), Window(settings.window)
        self.beginning: list[float] = []
        self.first: float | None = None  # median of the first full window
        self.best = math.inf  # lowest median of a full window
        self.accepted = 0

    def spike(self, step: int, loss: float, norm: float | None) -> Alarm | None:
        """A loss or gradient norm far above those before it."""
        by = self.settings
        if by.loss_spike != "off" and self.losses.has_enough:
            limit = self.losses.limit(by.loss_spike_z, by.loss_spike_ratio)
            if loss > limit:
                return _spike("loss_spike", "loss", step, loss, self.losses.median, limit)
        if norm is not None and by.grad_norm_spike != "off" and self.norms.has_enough:
            limit = self.norms.limit(by.grad_norm_spike_z, by.grad_norm_spike_ratio)
            if norm > limit:
                return _spike("grad_norm_spike", "gradient norm", step, norm, self.norms.median, limit)
        return None

    def accept(self, step: int, loss: float, norm: float | None) -> None:
        self.accepted += 1
        self.losses.add(step, loss)
        if norm is not None:
            self.norms.add(step, norm)
        if len(self.beginning) < _BEGINNING:
            self.beginning.append(loss)
        if self.losses.is_full:
            median = self.losses.median
            self.first = median if self.first is None else self.first
            self.best = min(self.best, median)

    def trend(self, step: int) -> Alarm | None:
        """A loss that rose and stayed up, or never fell."""
        return self._divergence(step) or self._flat(step)

    def _divergence(self, step: int) -> Alarm | None:
        if self.settings.divergence == "off" or not self.losses.is_full or self.first is None:
            return None
        median = self.losses.median
        limit = max(self.best * self.settings.divergence_ratio, self.best + _RISE, self.first)
        if median <= limit:
            return None
        since = next(at for at, value in self.losses.values if value > limit)
        return Alarm(
            "divergence", step, f"The loss is diverging: the median of the last {len(self.losses.values)} steps is "
            f"{median:.4g}; the best so far was {self.best:.4g}.", value=median, limit=limit, since=since,
            fix="Lower train.learning_rate or raise the warm-up.",
        )  # fmt: skip

    def _flat(self, step: int) -> Alarm | None:
        late, every = self.accepted - self.settings.flat_loss_steps, self.settings.window
        if self.settings.flat_loss == "off" or late < 0 or late % every or late >= _FLAT_CHECKS * every:
            return None
        began, now = statistics.median(self.beginning), self.losses.median
        if now < began:
            return None
        return Alarm(
            "flat_loss", step, f"The loss has not decreased: {now:.4g} after {self.accepted} steps, {began:.4g} at "
            "the start (medians).", value=now, limit=began,
            fix="Raise train.learning_rate or lora.r, and check the training data: shardtune data inspect.",
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses.values), "norms": list(self.norms.values), "beginning": list(self.beginning),
            "first": self.first, "best": self.best if math.isfinite(self.best) else None, "accepted": self.accepted,
        }  # fmt: skip

    def restore(self, saved: dict[str, Any]) -> None:
        self.losses = Window(self.settings.window, saved["losses"])
        self.norms = Window(self.settings.window, saved["norms"])
        self.beginning, self.first, self.accepted = list(saved["beginning"]), saved["first"], saved["accepted"]
        self.best = math.inf if saved["best"] is None else saved["best"]


def _spike(guard: str, what: str, step: int, value: float, median: float, limit: float) -> Alarm:
    return Alarm(
        guard, step, f"The {what} of step {step} is {value:.4g}, {value / max(median, 1e-30):.1f} times the median of "
        f"the preceding steps ({median:.4g}).", value=value, limit=limit,
        fix="Inspect these rows; lower train.learning_rate or train.max_grad_norm, or skip such steps with "
        f"guards.{guard}: skip-step.",
    )  # fmt: skip
