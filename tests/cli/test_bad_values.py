"""Wrong on purpose, through the command line: every answer is a message and exit code 2, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import Command
from toys import toy_config

from shardtune.config import load_config, render, render_yaml
from shardtune.config.suggestions import section_fields
from shardtune.errors import UserInputError
from shardtune.launch.named_paths import check_named_paths, not_checked

# As a YAML value or after `-o key=`.
NONSENSE = (
    "-1", "0", "-0", "1.5", "1e400", "1e300", ".inf", "-.inf", ".nan", "1e-300", "9" * 26, "0x10", "1_000", "null", "~",
    "true", "[]", "{}", "[1,2]", "''", "abc", "é🎉", "2026-01-01", "!!python/object:os.system x", "*a", "&a 1", "(", "[",
    '"a\\0b"', "/dev/null", "x" * 5000,
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # a relative output_dir is looked for here
    return toy_config(tmp_path, toy_model, toy_data)


def answer(shardtune: Command, *args: object, env: dict[str, str] | None = None) -> str:
    result = shardtune(*args, env=env)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("section", section_fields())
def test_any_setting_may_be_given_anything(config: Path, section: str) -> None:
    """Taken or refused, in words; and what is taken can be written down and looked at."""
    for key in section_fields()[section].model_fields:
        for value in NONSENSE:
            try:
                resolved = load_config(config, [f"{section}.{key}={value}"], environ={})
                check_named_paths(resolved, config)
            except UserInputError:
                continue
            json.dumps(render.as_json(resolved))
            assert render_yaml(resolved) and not_checked(resolved.config)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("lora.lora_alpha=1e300", "above 0 (the largest accepted value is 3e+38); got 1e+300"),
        ("data.max_length=99999999999", "at most 16777216"),
        ("train.gradient_accumulation_steps=99999999999999999999", "(the largest accepted value is 4.29497e+09)"),
        ("parallel.nproc=99999999999999999999", "(the largest accepted value is 4.29497e+09)"),
        ("parallel.step_timeout_minutes=1e20", "at most 527040"),
        ('train.output_dir="a\\0b"', "the string contains a null character; delete it"),
        ("model.ignore_tensors=['(']", "'(' is not a valid regular expression"),
    ],
)
def test_what_would_overflow_or_fail_late_is_refused_at_once(config: Path, value: str, said: str) -> None:
    with pytest.raises(UserInputError) as refused:
        load_config(config, [value], environ={})
    assert said in " ".join(str(refused.value).split())


def test_ports_that_do_not_exist_are_refused(shardtune: Command, config: Path) -> None:
    nodes = ("--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1")
    assert "--master-port" in answer(shardtune, "train", config, *nodes, "--master-port", 999999)
    assert "MASTER_PORT is 70000, not a valid port." in answer(
        shardtune, "train", config, *nodes, env={"MASTER_PORT": "70000"}
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export RUN --to onnx", "--to onnx: give merged, adapter, gguf, vllm or sglang."),
        ("export RUN --to merged --dtype=int4", "--dtype int4: give bf16, fp16, fp32 or fp8."),
        ("eval RUN --max-rows 0", "--max-rows 0: give 1 or more."),
        ("eval RUN --max-rows 1.5", "--max-rows 1.5: give a whole number."),
        ("export RUN --to merged --min-surviving-delta 3", "--min-surviving-delta 3: give 1 or less."),
        ("generate RUN --temperature warm", "--temperature warm: give a number."),
        ("submit CONFIG --to lsf", "--to lsf: give runai,"),
        ("run --nnodes two -- script.py", "--nnodes two: give a whole number."),
    ],
)
def test_an_option_says_what_it_takes_in_its_own_words(words: str, said: str) -> None:
    """In this process: nothing is imported but the command line."""
    from typer.testing import CliRunner

    from shardtune.cli.main import app

    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "150"})
    answered = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and said in answered and "Input should" not in answered, result.output


def test_a_name_too_long_for_a_file_is_no_run(shardtune: Command) -> None:
    assert "There is no run 'xxx" in answer(shardtune, "checkpoints", "x" * 5000)
    assert "There is no run 'xxx" in answer(shardtune, "report", "x" * 5000)


@pytest.mark.parametrize("key", ["model.model_name_or_path", "data.dataset_name_or_path"])
def test_a_path_too_long_for_a_file_is_refused_by_train(shardtune: Command, config: Path, key: str) -> None:
    assert "It cannot be read: File name too long" in answer(shardtune, "train", config, "-o", f"{key}=/{'x' * 300}")


def test_the_quickstart_writes_into_no_file(shardtune: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"'{tmp_path}/file' is a file, not a folder." in answer(
        shardtune, "quickstart", "--tiny", "--output-dir", tmp_path / "file"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (bytes(range(128, 256)), "not UTF-8 text"),
        (b"- a\n- b\n", "the file is a list, not sections"),
        ("modèle: é🎉\n".encode(), "did you mean the section `model`?"),
    ],
    ids=["empty", "binary", "list", "unicode"],
)
def test_a_file_that_is_no_config_is_answered(shardtune: Command, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    assert said in answer(shardtune, "train", "--config", tmp_path / "run.yaml")


def test_a_command_that_does_not_exist_is_answered_with_the_nearest(shardtune: Command) -> None:
    assert "Did you mean 'train'?" in answer(shardtune, "trian", "run.yaml")
    assert "--nproc" in answer(shardtune, "train", "run.yaml", "--nporc", 2)


def test_nothing_is_left_behind_by_a_refusal(shardtune: Command, config: Path) -> None:
    before = sorted(config.parent.iterdir())
    answer(shardtune, "train", config, "-o", "train.num_train_epochs=0", "-o", "train.per_device_train_batch_size=0")
    assert sorted(config.parent.iterdir()) == before
