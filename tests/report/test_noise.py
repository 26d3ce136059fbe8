"""An interval holds what it says: the mean of more rows of the same kind, in 95 of 100 evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardtune.data.order import StepOrder
from shardtune.report.noise import Difference, Groups, difference, interval_of, student_t


def evaluations(times: int, *, groups: int = 32, shift: float = 0.0, seed: int = 0) -> list[tuple[Groups, Groups]]:
    """Two checkpoints, `shift` apart, on the same rows: of very different lengths, harder the longer, tokens correlated."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(times):
        lengths = rng.integers(5, 400, size=(groups, 6))
        hard = rng.normal(1.5, 0.5, size=lengths.shape) + lengths / 400
        other = hard + shift + rng.normal(0, 0.05, size=lengths.shape)
        tokens = lengths.sum(axis=1)
        means = [(lengths * losses).sum(axis=1) / tokens for losses in (hard, other)]
        pair = [Groups(tuple(map(int, tokens)), tuple(map(float, mean))) for mean in means]
        found.append((pair[0], pair[1]))
    return found


def mean(groups: Groups) -> float:
    return sum(n * m for n, m in zip(groups.tokens, groups.means, strict=True)) / sum(groups.tokens)


@pytest.mark.parametrize("groups", [4, 32])
def test_the_interval_of_a_mean_contains_the_true_mean_in_95_of_100_evaluations(groups: int) -> None:
    lengths = np.arange(5, 400)
    true = 1.5 + (lengths**2).sum() / lengths.sum() / 400
    inside = 0
    for one, _ in evaluations(1500, groups=groups):
        interval = interval_of(one)
        assert interval is not None
        inside += abs(mean(one) - true) <= interval
    assert 0.93 < inside / 1500 < 0.97


def test_of_two_equal_checkpoints_five_in_a_hundred_differ_beyond_the_noise() -> None:
    found = [difference(mean(b), b, mean(a), a) for a, b in evaluations(1500)]
    outside = sum(gap is not None and not gap.is_within_noise for gap in found)
    assert 0.03 < outside / 1500 < 0.07


def test_rows_that_err_like_their_neighbours_do_not_make_the_noise_look_small() -> None:
    """Parts of one document: dealt out to the groups in turn, they hold the true mean in 60 of 100 evaluations."""
    rng, inside, parts, documents = np.random.default_rng(0), 0, 8, 64
    order = StepOrder(parts * documents, micro_batch=1, accumulation=1, world_size=1, rank=0, seed=None)
    groups = np.array([order.part(batch, 32) for batch in range(len(order))])
    for _ in range(600):
        losses = np.repeat(rng.normal(2.0, 0.5, documents), parts) + rng.normal(0, 0.1, parts * documents)
        means = tuple(float(losses[groups == group].mean()) for group in range(32))
        one = Groups((16,) * 32, means)
        inside += abs(mean(one) - 2.0) <= (interval_of(one) or 0)
    assert 0.93 < inside / 600 < 0.97


@pytest.mark.parametrize("groups", [8, 32])
def test_the_luckiest_of_equal_checkpoints_is_not_called_better(groups: int) -> None:
    """The last of twenty against the best of them: 95 % intervals of one comparison are left in every sixth run."""
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(400):
        tokens = tuple(map(int, rng.integers(500, 1500, size=groups)))
        shared = rng.normal(2.0, 0.3, size=groups)
        runs = [Groups(tokens, tuple((shared + rng.normal(0, 0.05, size=groups)).tolist())) for _ in range(20)]
        best, last = min(runs[:-1], key=mean), runs[-1]
        gap = difference(mean(last), last, mean(best), best, comparisons=19)
        assert gap is not None
        alarms += not gap.is_within_noise and gap.value > 0
    assert alarms / 400 < 0.05


@pytest.mark.parametrize(
    ("freedom", "outside", "t"),
    [
        (1, 0.05, 12.706),
        (2, 0.001, 31.599),
        (3, 0.001, 12.924),
        (7, 0.05, 2.365),
        (30, 0.01, 2.750),
        (120, 0.05, 1.980),
    ],
)
def test_students_t_is_that_of_the_tables(freedom: int, outside: float, t: float) -> None:
    assert student_t(freedom, outside) == pytest.approx(t, abs=6e-4)


def test_a_difference_of_the_same_rows_is_known_better_than_either_loss() -> None:
    (a, b), *_ = evaluations(1, shift=0.02)
    gap, own = difference(mean(b), b, mean(a), a), interval_of(a)
    assert gap is not None and own is not None
    assert gap.paired and gap.interval < own / 5
    assert not gap.is_within_noise and gap.value > 0


def test_other_groups_are_compared_as_if_their_rows_were_others() -> None:
    a, b = Groups((10, 10, 10), (1.0, 1.1, 0.9)), Groups((15, 15), (1.05, 0.95))
    gap = difference(1.0, b, 1.0, a)
    mine, theirs = interval_of(a), interval_of(b)
    assert mine is not None and theirs is not None
    assert gap == Difference(0.0, math.hypot(mine, theirs), paired=False)


@pytest.mark.parametrize("groups", [None, Groups((7,), (1.0,)), Groups((7, 7), (1.0, math.nan))])
def test_what_cannot_be_estimated_has_no_interval(groups: Groups | None) -> None:
    assert interval_of(groups) is None
    assert difference(1.0, groups, 1.0, Groups((7, 7), (1.0, 1.2))) is None


def test_it_is_the_textbook_interval_where_all_groups_are_of_one_size() -> None:
    means = (1.0, 1.3, 0.8, 1.1, 0.9)
    wanted = 2.776445 * np.std(means, ddof=1) / math.sqrt(5)
    assert interval_of(Groups((20,) * 5, means)) == pytest.approx(wanted)
