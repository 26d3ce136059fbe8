from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shardtune.adapters.coverage import Coverage, TargetRow
from shardtune.config.schema import TrainSection
from shardtune.data.prepared import PreparedCounts
from shardtune.parallel.shard import Sharding
from shardtune.plan.steps import math_lines, training_math
from shardtune.plan.traffic import StepTraffic
from shardtune.terminal import say, size
from shardtune.train.summary import adapter_table, coverage_line, data_line, sharding_line, traffic_line
from shardtune.train.traffic import Traffic


def printed(thing: Any, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(thing)
    return output.getvalue()


def counts(**values: int) -> PreparedCounts:
    return PreparedCounts(
        **{
            "read": 1234,
            "rows": 1234,
            "tokens": 10_000,
            "supervised": 2500,
            "cut": 0,
            "dropped_short": 0,
            "dropped_unsupervised": 0,
            "largest_id": 9,
        }
        | values
    )


def test_data_is_told_with_its_supervised_tokens() -> None:
    assert data_line(counts()) == "1,234 rows, 10,000 tokens, 2,500 supervised (25 %)"


def test_whatever_was_left_out_is_told() -> None:
    line = data_line(counts(cut=3, dropped_short=1000, dropped_unsupervised=7))
    assert line.endswith(
        "(3 cut to max_length; 1,000 empty, dropped; 7 without a supervised token, dropped)"
    )  # fmt: skip
    assert data_line(counts(cut=3)).endswith("(3 cut to max_length)")


def test_the_training_math_shows_how_it_was_counted() -> None:
    section = TrainSection(per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=2)
    batch, steps = math_lines(training_math(section, rows=100, tokens=5000, processes=4))
    assert batch == "2 per device × 4 processes × 3 accumulation = 24 rows per step"
    assert steps == "10 (2 epochs of 100 rows / 24), 1 for warm-up, about 10,000 tokens"


@pytest.mark.parametrize(
    ("replicas", "shards", "begins"),
    [
        (1, 1, "one process on cpu, 2 × LlamaDecoderLayer; "),
        (1, 2, "FSDP2 over 2 processes on cpu, 2 × LlamaDecoderLayer; "),
        (3, 1, "replicate: the whole base on each of 3 processes on cpu; "),
        (3, 2, "hybrid: 3 replicas of the base, each over 2 processes on cpu, 2 × LlamaDecoderLayer; "),
    ],
)
def test_the_sharding_line_tells_what_this_rank_holds_and_why(replicas: int, shards: int, begins: str) -> None:
    mesh: Any = SimpleNamespace(replicas=replicas, shards=shards, size=replicas * shards)
    sharding = Sharding(mesh, "LlamaDecoderLayer", 2, local_bytes=3 << 19, total_bytes=3 << 20)
    processes: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    run: Any = SimpleNamespace(reason=lambda _: "it fits" if shards == 1 else None)
    line = sharding_line(sharding, processes, run)
    why = " (it fits)" if mesh.size > 1 and shards == 1 else ""
    assert line == f"{begins}this rank holds 1.5 MiB of 3 MiB{why}"


def test_the_traffic_line_says_what_crosses_the_network() -> None:
    sent, full = StepTraffic(110 << 20, 0, 110 << 20), StepTraffic(9 << 30, 0, 9 << 30)
    mesh: Any = SimpleNamespace(size=3, shards=1, splits_adapters_only=True)
    assert traffic_line(Traffic(sent, full), mesh) == (
        "a step sends 110 MiB from each node (full sharding would send 9 GiB); adapters are sharded over all processes"
    )
    assert traffic_line(Traffic(full, full), SimpleNamespace(size=1)) is None  # type: ignore[arg-type]


def test_the_adapter_table_has_a_line_for_each_pattern_as_it_was_written() -> None:
    rows = (TargetRow(".*[qv]_proj", 4, 1024, covers=4000, covers_active=4000), TargetRow("o[/]proj", 2, 512))
    text = printed(adapter_table(Coverage(rows, trainable=1536, total=153_600, base=152_064, active=152_064)))
    assert ".*[qv]_proj" in text  # not taken for a colour
    assert "o[/]proj" in text
    assert next(line for line in text.splitlines() if "[qv]" in line).split()[-4:] == ["modules", "1,024", "2.6", "%"]


def test_what_trains_and_what_it_acts_on_are_not_taken_for_each_other() -> None:
    rows = (TargetRow("all-linear", 210, 4_884_480, covers=106_168_320, covers_active=106_168_320),)
    coverage = Coverage(rows, 4_884_480, 139_399_488, 134_515_008, 134_515_008)
    assert coverage_line(coverage) == "4,884,480 parameters, 3.5 % of all; adapters on 78.9 % of the weights"


def test_what_trains_in_full_is_not_counted_as_adapters() -> None:
    rows = (TargetRow("attention", 8, 1_000, 0, 20_000, 20_000), TargetRow("in full", 2, 30_000, 0, 30_000, 30_000))
    coverage = Coverage(rows, 31_000, 101_000, 100_000, 100_000, in_full=30_000)
    expected = "31,000 parameters, 30.7 % of all; adapters on 20.0 % of the weights; 30.0 % train in full"
    assert coverage_line(coverage) == expected


def mixture() -> Coverage:
    rows = (
        TargetRow("attention", 180, 16_846_848, 0, 1_009_778_688, 1_009_778_688),
        TargetRow("mlp", 108, 1_067_581_440, 72, 116_870_086_656, 4_529_848_320.0),
    )
    return Coverage(rows, 1_084_428_288, 120_057_254_912, 118_972_826_624, 6_632_588_288.0, (4, 128))


def test_the_adapter_table_of_a_mixture_tells_what_a_token_passes() -> None:
    text = " ".join(printed(adapter_table(mixture()), 120).split())
    assert "active covered" in text and "108 modules, 72 tensors 1,067,581,440 98.2 % 68.3 %" in text
    assert "of those active per token (4 of 128 routed experts)" in coverage_line(mixture())


@pytest.mark.parametrize("width", [80, 120])
def test_the_adapter_table_fits_the_terminal_and_cuts_no_number(width: int) -> None:
    text = printed(adapter_table(mixture()), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "1,067,581,440" in text and "…" not in text


def said(width: int, label: str, text: str, *, terminal: bool) -> str:
    output = io.StringIO()
    say(Console(file=output, width=width, force_terminal=terminal, no_color=True), label, text)
    return re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())


def test_a_long_path_with_brackets_stays_whole_everywhere() -> None:
    path = "/runs/[a]/" + "x" * 200
    assert said(80, "adapter", path, terminal=False) == f"adapter   {path}\n"
    assert path in said(80, "adapter", path, terminal=True)


def test_a_terminal_gets_lines_that_break_between_words_and_a_log_gets_one_line() -> None:
    text = "FSDP2 over 2 processes on cpu, 30 × LlamaDecoderLayer; this rank holds 279 MiB of 558 MiB"
    assert said(80, "sharding", text, terminal=False) == f"sharding  {text}\n"
    assert said(80, "sharding", text, terminal=True).splitlines() == [
        "sharding  FSDP2 over 2 processes on cpu, 30 × LlamaDecoderLayer; this rank holds",
        "          279 MiB of 558 MiB",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1234, "1.21 KiB"), (999 << 10, "999 KiB"), (1023 << 10, "0.999 MiB"), (238e9, "222 GiB"), (3 << 39, "1.5 TiB")],
)  # fmt: skip
def test_sizes_are_told_in_three_digits(count: float, text: str) -> None:
    assert size(count) == text


def test_a_batch_that_is_larger_than_the_data_is_said() -> None:
    section = TrainSection(per_device_train_batch_size=8, gradient_accumulation_steps=1)
    batch, _ = math_lines(training_math(section, rows=5, tokens=50, processes=1))
    assert batch.endswith("= 8 rows per step, more than there are (5): steps are not full")
