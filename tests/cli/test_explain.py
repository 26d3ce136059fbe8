"""`shardtune explain`: settings, names of other tools, exit codes, error codes and pasted messages."""

from __future__ import annotations

import re

import pytest
from running import REPOSITORY
from typer.testing import CliRunner

from shardtune.checkpoint.changes import VERDICTS
from shardtune.cli.explain import complete_word
from shardtune.cli.main import app
from shardtune.config.explain import PAGES, all_settings, setting_facts
from shardtune.config.fsdp2_effects import FSDP2_EFFECTS
from shardtune.errors import UserInputError


def explain(*words: str) -> str:
    result = CliRunner().invoke(app, ["explain", *words], catch_exceptions=False, terminal_width=400)
    assert result.exit_code == 0
    return result.stdout


def line(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{label} "))


def test_a_setting_is_explained_by_its_path_or_its_key() -> None:
    text = explain("train.seed")
    assert text == explain("seed")
    assert "Seed of adapter initialisation" in text
    assert "42" in line(text, "default") and "a whole number" in line(text, "values")
    assert VERDICTS["train.seed"].meaning in line(text, "resume")
    assert "do not depend on the number of ranks" in line(text, "FSDP2")


def test_what_a_setting_needs_and_what_needs_it_comes_from_the_checks() -> None:
    assert "set dataloader_num_workers too" in line(explain("dataloader_prefetch_factor"), "refused")
    assert "train.report_to is …" in line(explain("trackio_space_id"), "refused")  # no value of a config to fill in
    assert line(explain("model.load"), "refused").split()[1] == "read-once:"
    assert "parallel.shard_size" in line(explain("parallel.shard"), "needed by")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("per_device_batch", "train.per_device_train_batch_size"),
        ("max_seq_length", "data.max_length"),
        ("fsdp_offload_params", "parallel.offload_params"),
        ("fsdp_config.fsdp_sharding_strategy", "parallel.shard: full"),
        ("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD → parallel.shard: hybrid, parallel.reshard_after_forward: true"),
        ("fsdp_cpu_offload", "parallel.offload_params: true"),  # a spelling from articles
        ("packing_strategy", "rows are packed best-fit"),
        ("load_in_4bit", "use `model.base_precision: fp8`"),
    ],
)
def test_names_of_accelerate_trl_and_others_are_answered_with_ours(name: str, ours: str) -> None:
    assert ours in explain(name)


def test_a_section_lists_its_settings_and_no_word_lists_the_sections() -> None:
    assert "lora.use_dora" in explain("lora")
    assert re.search(r"guards +Checks", explain()) and "out-of-memory" in explain()


def test_a_typo_is_refused_with_what_was_meant() -> None:
    for typo, meant in (
        ("learnig_rate", "train.learning_rate"),
        ("lora.rang", "lora.r"),
        ("out-of-memry", "out-of-memory"),
    ):
        with pytest.raises(UserInputError, match=re.escape(meant)):
            explain(typo)
    with pytest.raises(UserInputError, match="exit code 300"):
        explain("300")


def test_exit_codes_name_the_errors_behind_them() -> None:
    assert "no-progress" in explain("76") and explain("76") == explain("exit", "76")
    assert "yes" in line(explain("69"), "restart")
    assert "SIGSEGV" in explain("139") and "rank-killed" in explain("139")


def test_an_error_is_explained_by_its_code() -> None:
    text = explain("replicas-differ")
    assert line(text, "exit code").split()[-1] == "1" and "nvidia-smi -q -d ECC" in text and "docs/guards.md" in text


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("The current process just got forked, after parallelism has already been used", "tokenizer-fork"),
        ("does not recognize this architecture", "unknown-architecture"),
        ("KeyError: 'mistral4'", "unknown-architecture"),
        ("no kernel image is available for execution on the device", "cuda-build"),
    ],
)
def test_an_error_is_explained_by_a_message_of_a_library(message: str, code: str) -> None:
    assert explain(message).startswith(f"{code}\n")


@pytest.mark.parametrize("path", all_settings())
def test_every_setting_can_be_explained(path: str) -> None:
    facts = setting_facts(path)
    assert facts.meaning and facts.values and facts.default and path in VERDICTS


def test_tables_name_only_settings_that_exist_and_pages_that_mention_them() -> None:
    assert set(FSDP2_EFFECTS) <= set(all_settings())
    for start, page in PAGES.items():
        assert any(path.startswith(start) for path in all_settings()), start
        text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
        assert start.partition(".")[2].rstrip("_") in text, (start, page)


def test_settings_and_codes_are_completed() -> None:
    assert "train.learning_rate" in complete_word("train.learn") and "learning_rate" in complete_word("learn")
    assert complete_word("out-") == ["out-of-memory"]
