"""What do losses and answers add up to? Each metric of base and tuned model, their paired difference, and intervals.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardtune.errors import UserInputError
from shardtune.evaluation.intervals import Estimate, Numbers, bootstrap, paired_shares, wilson
from shardtune.evaluation.json_fields import FieldCounts, compared, parsed

MetricGroup = Literal["perplexity", "exact_match", "json"]
GROUPS: tuple[MetricGroup, ...] = get_args(MetricGroup)
Side = Literal["base", "tuned"]
_JSON_SHARE = 0.5  # of the expected answers, from which on `json` is measured unasked


@dataclass(frozen=True)
class Metric:
    """One number of both sides.

    Attributes:
        kind: `share` is from 0 to 1, and shown in percent.
        better: Which direction is.
        rows: Over how many rows.
        difference: tuned − base over the same rows; None with one side alone.
    """

    name: str
    title: str
    kind: Literal["share", "number"]
    better: Literal["lower", "higher"]
    rows: int
    sides: Mapping[Side, Estimate]
    difference: Estimate | None

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `unclear` (the interval holds 0), or empty where that is not known."""
        found = self.difference
        if found is None or found.low is None or found.high is None:
            return ""
        if found.low <= 0 <= found.high:
            return "unclear"
        return "better" if (found.low > 0) == (self.better == "higher") else "worse"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "better": self.better,
            "rows": self.rows,
            **{side: estimate.as_dict() for side, estimate in self.sides.items()},
            "difference": self.difference.as_dict() if self.difference is not None else None,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class ChosenMetrics:
    """Which groups are measured, and which are not and why."""

    groups: tuple[MetricGroup, ...]
    left_out: Mapping[str, str]

    @property
    def need_answers(self) -> bool:
        """Whether the models have to answer: losses need none."""
        return bool({"exact_match", "json"}.intersection(self.groups))


def choose_metrics(asked: str | None, no_answers: str, expected: Sequence[str]) -> ChosenMetrics:
    """The groups of `--metrics`, or those that make sense for the rows.

    Args:
        asked: Names with commas between them; None: all that make sense.
        no_answers: Why no row has an answer to compare with; empty where some have.
        expected: The expected answers.

    Raises:
        UserInputError: a name is unknown, or what was asked for makes no sense here.
    """
    wanted = parse_metrics(asked) if asked is not None else GROUPS
    refused: dict[str, str] = {}
    if no_answers:
        refused = dict.fromkeys(("exact_match", "json"), no_answers)
    else:
        as_json = sum(parsed(text) is not None for text in expected)
        if not as_json:
            refused["json"] = "no expected answer is a JSON object or list"
        elif asked is None and as_json < _JSON_SHARE * len(expected):
            refused["json"] = (
                f"only {as_json:,} of {len(expected):,} expected answers are JSON objects or lists; --metrics json "
                "scores those"
            )
    for name in wanted if asked is not None else ():
        if name in refused:
            possible = [group for group in GROUPS if group not in refused]
            raise UserInputError(
                f"--metrics {name} cannot be computed on this data.",
                why=f"{refused[name][:1].upper()}{refused[name][1:]}.",
                fix=f"Ask for {', '.join(possible)}.",
            )
    left_out: dict[str, str] = {name: why for name, why in refused.items() if name in wanted}
    return ChosenMetrics(tuple(name for name in wanted if name not in refused), left_out)


def perplexity(losses: Mapping[Side, NDArray[np.float64]], tokens: NDArray[np.int64]) -> list[Metric]:
    """Loss per supervised token, and its exponential.

    Args:
        losses: Summed over each row's supervised tokens.
        tokens: How many those are.
    """
    ratio = _ratio_of(0, 1)
    found = []
    for name, title, map_ in (("loss", "loss", _same), ("perplexity", "perplexity", _exp)):
        by_side = {
            side: bootstrap(np.column_stack([of_side, tokens]), _then(ratio, map_)) for side, of_side in losses.items()
        }
        difference = None
        if len(losses) == 2:
            together = np.column_stack([losses["tuned"], tokens, losses["base"], tokens])
            difference = bootstrap(together, _minus(_then(ratio, map_), _then(_ratio_of(2, 3), map_)))
        found.append(Metric(name, title, "number", "lower", len(tokens), by_side, difference))
    return found


def shares(name: str, title: str, hits: Mapping[Side, Sequence[bool]]) -> Metric:
    """How often something holds: Wilson's intervals, and Newcombe's for the difference."""
    rows = len(next(iter(hits.values())))
    by_side = {side: wilson(sum(of_side), rows) for side, of_side in hits.items()}
    difference = paired_shares(hits["tuned"], hits["base"]) if len(hits) == 2 else None
    return Metric(name, title, "share", "higher", rows, by_side, difference)


def json_metrics(expected: Sequence[str], answers: Mapping[Side, Sequence[str]]) -> list[Metric]:
    """Validity, and precision, recall and F1 of fields, over the rows whose expected answer is an object or a list."""
    rows = [number for number, text in enumerate(expected) if parsed(text) is not None]
    valid: dict[Side, list[bool]] = {}
    counts: dict[Side, Numbers] = {}
    for side, of_side in answers.items():
        valid[side] = [parsed(of_side[number]) is not None for number in rows]
        each = [field_counts(expected[number], of_side[number]) for number in rows]
        counts[side] = np.array([[one.right, one.answered, one.expected] for one in each], float).reshape(-1, 3)
    found = [shares("json_valid", "valid JSON", valid)]
    for name, title, statistic in (
        ("json_precision", "field precision", _ratio_of(0, 1)),
        ("json_recall", "field recall", _ratio_of(0, 2)),
        ("json_f1", "field F1", _f1(0)),
    ):
        by_side = {side: bootstrap(of_side, statistic) for side, of_side in counts.items()}
        difference = None
        if len(counts) == 2:
            shifted = {"json_precision": _ratio_of(3, 4), "json_recall": _ratio_of(3, 5), "json_f1": _f1(3)}[name]
            difference = bootstrap(np.hstack([counts["tuned"], counts["base"]]), _minus(statistic, shifted))
        found.append(Metric(name, title, "share", "higher", len(rows), by_side, difference))
    return found


def field_counts(expected: str, answer: str) -> FieldCounts:
    """Of one answer; the expected one must be JSON."""
    return compared(parsed(expected), parsed(answer))


def is_exact(expected: str, answer: str) -> bool:
    """The same text, blanks and line breaks at both ends aside."""
    return expected.strip() == answer.strip()


def parse_metrics(asked: str) -> tuple[MetricGroup, ...]:
    """The groups that `--metrics` names.

    Raises:
        UserInputError: there is no such metric.
    """
    names = [name.strip() for name in asked.split(",") if name.strip()]
    names = ["perplexity" if name == "loss" else name for name in names]  # one group: the one is computed of the other
    unknown = [name for name in names if name not in GROUPS]
    if unknown or not names:
        raise UserInputError(
            f"--metrics: there is no metric '{unknown[0]}'." if unknown else "--metrics names no metric.",
            fix=f"Use one or more of {', '.join(GROUPS)}, separated by commas.",
        )
    return tuple(group for group in GROUPS if group in names)


Statistic = Callable[[Numbers], Numbers]


def _ratio_of(above: int, below: int) -> Statistic:
    def ratio(totals: Numbers) -> Numbers:
        return _divided(totals[:, above], totals[:, below])

    return ratio


def _f1(first: int) -> Statistic:
    """2 · right / (answered + expected)."""

    def f1(totals: Numbers) -> Numbers:
        return _divided(2 * totals[:, first], totals[:, first + 1] + totals[:, first + 2])

    return f1


def _divided(above: Numbers, below: Numbers) -> Numbers:
    found: Numbers = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
    return found


def _then(statistic: Statistic, map_: Callable[[Numbers], Numbers]) -> Statistic:
    return lambda totals: map_(statistic(totals))


def _minus(one: Statistic, other: Statistic) -> Statistic:
    return lambda totals: one(totals) - other(totals)


def _exp(values: Numbers) -> Numbers:
    return np.exp(np.minimum(values, 700.0))  # beyond, a float has no number for it


def _same(values: Numbers) -> Numbers:
    return values
