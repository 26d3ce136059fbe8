"""CONFIG may be written `--config FILE`, as trainers elsewhere have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from running import Command
from toys import toy_config
from typer.testing import CliRunner

from shardtune.cli.main import app


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(tmp_path, toy_model, toy_data)


def _commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*names, name))
        else:
            yield (*names, name), command


def test_every_command_with_a_config_takes_both_spellings() -> None:
    takes = {name: command for name, command in _commands(typer.main.get_command(app)) if _argument(command)}
    assert {("train",), ("config", "show"), ("config", "validate"), ("data", "inspect"), ("data", "prepare")} <= set(
        takes
    )
    for name, command in takes.items():
        options = [option for param in command.params for option in param.opts]
        assert "--config" in options, f"shardtune {' '.join(name)} has CONFIG but not --config: use cls=ConfigCommand"


def _argument(command: Any) -> bool:
    return any(param.name == "config" and param.param_type_name == "argument" for param in command.params)


@pytest.mark.parametrize("spelling", [["--config", "FILE"], ["--config=FILE"]])
def test_the_named_file_is_read_with_the_rest_of_the_command_line(
    shardtune: Command, config: Path, spelling: list[str]
) -> None:
    words = [word.replace("FILE", str(config)) for word in spelling]
    result = shardtune("config", "validate", *words, "-o", "lora.r=9")
    assert result.returncode == 0, result.stderr
    assert f"ok: {config}: " in result.stdout and "LoRA r=9" in result.stdout


def test_train_reads_it_too(shardtune: Command, config: Path) -> None:
    result = shardtune("train", "--config", config, "-o", "model.model_name_or_path=/no/such/model")
    assert result.returncode == 2
    assert "The model folder '/no/such/model' does not exist." in result.stderr


def test_both_spellings_at_once_are_refused_with_both_names(shardtune: Command, config: Path) -> None:
    result = shardtune("config", "validate", config, "--config", "other.yaml")
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.returncode == 2 and "CONFIG is given twice" in said and "other.yaml" in said


def test_neither_spelling_names_both(shardtune: Command) -> None:
    result = shardtune("train")
    assert result.returncode == 2 and "Missing argument 'CONFIG' (or --config FILE)." in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "run", "--data", "a", "--data", "b"],
        ["train", "run.yaml", "--nproc", "1", "--nproc=2"],
        ["submit", "--namespace", "a", "-n", "b", "--", "x.py"],
        ["run", "--name", "a", "--name", "a", "--", "x.py"],
        ["data", "inspect", "run.yaml", "--config", "a", "--config", "b"],
        ["config", "show", "run.yaml", "--accelerate-config", "a", "--accelerate-config", "b"],
    ],
)
def test_a_second_value_of_an_option_that_has_one_is_refused(words: list[str]) -> None:
    found = CliRunner().invoke(app, words)
    said = " ".join(found.output.replace("│", " ").split())
    assert found.exit_code == 2 and "is given more than once, but takes one value" in said


@pytest.mark.parametrize(
    "words", [["-v", "-v", "--", "x.py", "--x", "1", "--x", "2"], ["-o", "train.seed=1", "-o", "train.seed=2"]]
)
def test_flags_overrides_and_the_options_of_a_script_may_be_repeated(words: list[str]) -> None:
    (run,) = (command for name, command in _commands(typer.main.get_command(app)) if name == ("run",))
    assert run.make_context("run", words)
