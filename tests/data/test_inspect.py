"""The numbers of a set, and the plot of its lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_prepared import FakePrepared, fake_set
from rich.console import Console

from shardtune.data.histogram import Bucket, bar, histogram_lines, length_buckets, share
from shardtune.data.inspect import Report, count_split, percentile, split_facts
from shardtune.data.inspect_terminal import print_report
from shardtune.data.show_rows import show_rows


def lengths(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    "values",
    [[1], [5, 5, 5], [2, 1024], [1024], [100, 103, 120], [1, 5, 17, 300, 1023, 1024], list(range(1, 1025)), [2000, 3]],
)
def test_every_row_stands_in_exactly_one_bucket(values: list[int]) -> None:
    buckets = length_buckets(lengths(*values), 1024)
    assert sum(b.rows for b in buckets) == len(values)
    assert sum(b.tokens for b in buckets) == sum(values)
    assert all(a.high < b.low for a, b in pairwise(buckets))


def test_buckets_widen_with_length() -> None:
    buckets = length_buckets(lengths(*range(10, 2000)), 2048)
    widths = [b.high - b.low for b in buckets[:-1]]
    assert widths == sorted(widths) and widths[0] < 5 and widths[-1] > 400


def test_a_wide_range_still_fits_a_screen() -> None:
    assert len(length_buckets(lengths(1, 2, 60, 5_000, 900_000), 1_000_000)) <= 22


def test_rows_of_similar_lengths_are_told_apart() -> None:
    buckets = [b for b in length_buckets(lengths(*range(100, 121)), 1024) if b.rows]
    assert len(buckets) >= 6


def test_max_length_has_a_bucket_of_its_own_also_when_no_row_reaches_it() -> None:
    for values in ([5, 9], [5, 1024], [1024]):
        marked = [b for b in length_buckets(lengths(*values), 1024) if b.is_limit]
        assert marked == [Bucket(1024, 1024, values.count(1024), 1024 * values.count(1024), True)]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_plot_fits_its_columns_and_marks_max_length(columns: int) -> None:
    rng = np.random.default_rng(0)
    values = np.minimum(rng.lognormal(5, 1, 100_000).astype(np.int64) + 2, 1024)
    lines = histogram_lines(length_buckets(values, 1024), columns)
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line.endswith("◀ max_length")] == [lines[-1]]
    longest = max(line.count("█") for line in lines)
    assert longest >= columns * 0.3  # the tallest bucket uses the width there is


def test_the_share_of_tokens_is_told_where_there_is_room() -> None:
    buckets = length_buckets(lengths(10, 20), 1024)
    assert "of tokens" in histogram_lines(buckets, 120)[0]
    assert "of tokens" not in histogram_lines(buckets, 80)[0]


def test_bars_are_in_proportion_and_a_single_row_is_seen() -> None:
    assert bar(50, 100, 10) == "█████"
    assert bar(1, 16, 2) == "▏"
    assert bar(1, 1_000_000, 10) == "▏"
    assert bar(0, 100, 10) == ""
    assert bar(100, 100, 10) == "█" * 10


def test_a_share_never_hides_the_few() -> None:
    assert [share(0, 9), share(1, 100_000), share(1, 30), share(41, 100), share(9999, 10_000), share(7, 7)] == [
        "0 %", "<0.1 %", "3.3 %", "41 %", "99.9 %", "100 %",
    ]  # fmt: skip


def test_a_percentile_is_the_length_of_a_row() -> None:
    values = lengths(*range(1, 101))
    assert (percentile(values, 50), percentile(values, 95), percentile(lengths(3, 1000), 50)) == (50, 95, 3)


def some_rows() -> FakePrepared:
    return FakePrepared(
        [([5] * 6 + [2], 3), ([6] * 3 + [2], 1), ([7] * 9 + [2], 5)], read=7, cut=1, dropped_short=2, dropped_long=1,
        skipped_errors=1, duplicates=1, without_eos=1,
    )  # fmt: skip


def test_numbers_of_a_split_are_counted_from_its_rows(words: Any) -> None:
    numbers = count_split(some_rows(), "train", words, 16)
    assert numbers is not None
    assert (numbers.shortest, numbers.mean, numbers.longest) == (4, 7.0, 10)
    assert [(row.number, row.tokens) for row in numbers.longest_rows] == [(2, 10), (0, 7), (1, 4)]
    assert numbers.longest_rows[0].beginning.startswith("w02 w02")
    assert numbers.packed_rows == 2 and numbers.packing_efficiency == pytest.approx(21 / 32)


def test_what_all_long_rows_begin_with_is_left_out_of_their_beginnings(words: Any) -> None:
    numbers = count_split(FakePrepared([([5] * 9 + [6, 2], 1), ([5] * 9 + [7, 7, 2], 1)]), "train", words, 16)
    assert numbers is not None
    assert [row.beginning for row in numbers.longest_rows] == ["… w02 w02", "… w01"]
    alike = count_split(FakePrepared([([5] * 9 + [2], 1)] * 2), "train", words, 16)
    assert alike is not None and alike.longest_rows[0].beginning.startswith("w00 w00")


def test_an_empty_split_has_no_numbers(words: Any) -> None:
    assert count_split(FakePrepared([]), "val", words, 16) is None


def test_facts_say_what_became_of_every_row(words: Any) -> None:
    numbers = count_split(some_rows(), "train", words, 16)
    assert numbers is not None
    facts = {fact.label: fact.text for fact in split_facts(numbers)}
    assert facts["rows"] == "3 from 7 read (2 dropped as empty, 1 skipped as unreadable)"
    assert facts["tokens"] == "21, 57 % of them supervised (carry loss)"
    assert facts["too long"] == "1 row cut (33 %), 1 row dropped (14 %) beyond max_length 16"
    assert facts["repeated"] == "1 row (33 %) identical to an earlier row"
    assert facts["end"] == "1 row (33 %) without a supervised end-of-sequence token"
    assert facts["packing"] == "3 rows fit into 2 sequences of 16 tokens, 65.6 % full"


def report(words: Any, **changes: Any) -> Report:
    prepared = some_rows()
    both = fake_set(prepared, prepared, overlap=1)
    splits = tuple(count_split(prepared, name, words, 16) for name in ("train", "val"))
    values: dict[str, Any] = {
        "source": "rows.jsonl", "format_name": both.choice.name, "format_why": both.choice.why, "folder": both.folder,
        "from_cache": True, "overlap": 1, "splits": splits, "findings": (), "shown_of": "train",
        "rows": tuple(show_rows(prepared, 2, words)),
    }  # fmt: skip
    return Report(**{**values, **changes})


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_prints_both_splits_and_rows_without_colour_codes(
    words: Any, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(Console(width=columns), report(words))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "format    chat (the column 'messages' holds a list of messages)" in text
    assert "1 of 3 validation rows are also in train" in text
    assert text.count("◀ max_length") == 2
    assert "w00 w00 w00⟦ w00 w00 w00⟨</s>⟩⟧" in text
    assert "⟦…⟧ supervised" in text
    assert text.endswith("ok: no problems found in the data.\n")


def test_on_a_terminal_colour_takes_the_place_of_brackets(words: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Console(width=100, force_terminal=True, color_system="standard", no_color=False), report(words))
    text = capsys.readouterr().out
    assert "⟦" not in text and "\x1b[4;32m" in text


def test_a_terminal_without_colour_gets_brackets(words: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Console(width=100, force_terminal=True, no_color=True), report(words))
    assert "⟦ w00 w00 w00⟨</s>⟩⟧" in capsys.readouterr().out
