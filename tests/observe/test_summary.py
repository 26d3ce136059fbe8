from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shardtune.adapters.coverage import Coverage, TargetRow
from shardtune.config.schema import TrainSection
from shardtune.data.prepared import PreparedCounts
from shardtune.observe.summary import adapter_table, data_line, math_lines, say, sharding_line, size
from shardtune.plan.steps import training_math


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


def test_data_is_told_with_the_share_that_carries_loss() -> None:
    assert data_line(counts()) == "1,234 rows, 10,000 tokens, 25% of them carry loss"


def test_whatever_was_left_out_is_told() -> None:
    line = data_line(counts(cut=3, dropped_short=1000, dropped_unsupervised=7))
    assert line.endswith(
        "(3 cut to max_length; 1,000 empty, dropped; 7 without a supervised token, dropped)"
    )  # fmt: skip
    assert data_line(counts(cut=3)).endswith("(3 cut to max_length)")


def test_the_training_math_shows_how_it_was_counted() -> None:
    section = TrainSection(per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=2)
    batch, steps = math_lines(training_math(section, rows=100, tokens=5000, processes=4))
    assert batch == "2 per device × 4 processes × 3 accumulation = 24 rows a step"
    assert steps == "10 (2 epochs of 100 rows / 24), 1 warm-up, about 10,000 tokens"


def test_the_sharding_line_tells_what_this_rank_holds() -> None:
    sharding: Any = SimpleNamespace(
        layer_class="LlamaDecoderLayer", units=2, local_bytes=1_500_000, total_bytes=3_000_000
    )
    processes: Any = SimpleNamespace(world_size=2, device=SimpleNamespace(type="cpu"))
    line = sharding_line(sharding, processes)
    assert line == "FSDP2 over 2 processes on cpu, 2 × LlamaDecoderLayer; this rank holds 1.5 MB of 3 MB"


def test_the_adapter_table_has_a_line_for_each_pattern_as_it_was_written() -> None:
    rows = (TargetRow(".*[qv]_proj", 4, 1024, covers=4000, covers_active=4000), TargetRow("o[/]proj", 2, 512))
    text = printed(adapter_table(Coverage(rows, trainable=1536, total=153_600, base=152_064, active=152_064)))
    assert ".*[qv]_proj" in text  # not taken for a colour
    assert "o[/]proj" in text
    assert "1,024" in text
    assert "2.63%" in text
    assert "which every token passes" in text
    last = next(line for line in text.splitlines() if "all trainable" in line)
    assert "6 modules" in last
    assert "1,536" in last
    assert "2.63%" in last


def mixture() -> Coverage:
    rows = (
        TargetRow("attention", 180, 16_846_848, 0, 1_009_778_688, 1_009_778_688),
        TargetRow("mlp", 108, 1_067_581_440, 72, 116_870_086_656, 4_529_848_320.0),
    )
    return Coverage(rows, 1_084_428_288, 120_057_254_912, 118_972_826_624, 6_632_588_288.0, (4, 128))


def test_the_adapter_table_of_a_mixture_tells_what_a_token_passes() -> None:
    text = " ".join(printed(adapter_table(mixture()), 120).split())
    assert "108 modules, 72 tensors" in text
    assert "68.30% │ 98.23%" in text
    assert "118,972,826,624 in all and of the 6,632,588,288 that one token passes (4 of 128 routed experts)" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_adapter_table_fits_the_terminal_and_cuts_no_number(width: int) -> None:
    text = printed(adapter_table(mixture()), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "1,084,428,288" in text and "…" not in text


def test_a_long_path_with_brackets_stays_on_one_line_as_it_is() -> None:
    output = io.StringIO()
    path = "/runs/[a]/" + "x" * 200
    say(Console(file=output, width=80), "adapter", path)
    assert output.getvalue() == f"adapter   {path}\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (999400, "999 kB"), (999700, "1 MB"), (999999, "1 MB"), (238000000000.0, "238 GB"), (1500000000000.0, "1.5 TB")],
)  # fmt: skip
def test_sizes_are_told_in_three_digits(count: float, text: str) -> None:
    assert size(count) == text
