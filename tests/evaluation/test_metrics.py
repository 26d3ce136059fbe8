"""Metrics are chosen by what the rows can tell, and differences are paired."""

from __future__ import annotations

import numpy as np
import pytest

from shardtune.errors import UserInputError
from shardtune.evaluation.metrics import choose_metrics, is_exact, perplexity, shares


def test_plain_text_has_perplexity_alone() -> None:
    chosen = choose_metrics(None, "plain text has no answers", [])
    assert chosen.groups == ("perplexity",) and set(chosen.left_out) == {"exact_match", "json"}


def test_a_metric_that_makes_no_sense_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(UserInputError, match="json cannot be computed") as refused:
        choose_metrics("perplexity,json", "", ["an answer"])
    assert "perplexity, exact_match" in refused.value.fix


def test_a_metric_that_nobody_knows_is_refused() -> None:
    for asked in ("bleu", " , "):
        with pytest.raises(UserInputError, match="--metrics"):
            choose_metrics(asked, "", ["an answer"])


def test_json_is_scored_unasked_where_most_answers_are_json() -> None:
    few, most = ['{"a": 1}', "b", "c"], ['{"a": 1}', "[]", "c"]
    assert (
        "json" not in choose_metrics(None, "", few).groups
        and "1 of 3" in choose_metrics(None, "", few).left_out["json"]
    )
    assert "json" in choose_metrics(None, "", most).groups
    assert choose_metrics("json", "", few).groups == ("json",)


def test_an_exact_match_disregards_blanks_at_both_ends_only() -> None:
    assert is_exact("a  b\n", " a  b")
    assert not is_exact("a  b", "a b") and not is_exact("a", "A")


def test_loss_is_weighed_by_tokens_and_its_difference_is_paired() -> None:
    tokens = np.array([1, 9] * 20)
    noise = np.random.default_rng(0).normal(0, 1.0, size=40)
    base = tokens * (3 + noise)
    found, _ = perplexity({"base": base, "tuned": base - 0.1 * tokens}, tokens)
    assert found.sides["base"].value == pytest.approx(base.sum() / tokens.sum())
    assert found.difference is not None and found.difference.value == pytest.approx(-0.1)
    # Each side alone is uncertain by far more than they differ; row by row they differ by the same.
    assert found.sides["base"].high is not None and found.sides["base"].low is not None
    assert found.sides["base"].high - found.sides["base"].low > 0.2
    worse = perplexity({"base": base, "tuned": base + tokens * (0.1 + 0.01 * noise)}, tokens)
    assert [one.verdict for one in worse] == ["worse", "worse"]


def test_a_perplexity_beyond_numbers_stays_one() -> None:
    tokens = np.array([1, 2])
    _, found = perplexity({"tuned": np.array([1e5, 1e5])}, tokens)
    assert np.isfinite(found.sides["tuned"].value or np.inf)


def test_verdicts_follow_the_interval_and_the_direction() -> None:
    many = shares("exact_match", "exact match", {"base": [False] * 30, "tuned": [True] * 25 + [False] * 5})
    few = shares("exact_match", "exact match", {"base": [False] * 30, "tuned": [True] + [False] * 29})
    alone = shares("exact_match", "exact match", {"tuned": [True] * 3})
    assert (many.verdict, few.verdict, alone.verdict) == ("better", "unclear", "")
