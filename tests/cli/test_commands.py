"""The command line itself: what there is, fast, without torch where none is needed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from running import Command
from toys import toy_config

from shardtune import __version__


def test_help_names_every_command(shardtune: Command) -> None:
    result = shardtune("--help")
    assert result.returncode == 0
    for command in ("train", "quickstart", "config", "explain"):
        assert command in result.stdout


def test_help_of_train_names_its_options_and_settings(shardtune: Command) -> None:
    text = shardtune("train", "--help").stdout
    for option in ("--override", "--nproc", "--accelerate-config", "--debug-freq", "--run-id"):
        assert option in text
    assert "train.learning_rate" in text and "Peak learning rate." in text  # from the field itself


def test_version_is_the_packages(shardtune: Command) -> None:
    assert shardtune("--version").stdout == f"shardtune {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["quickstart", "--help"], ["config", "validate", "CONFIG"], ["explain", "seed"]],
)
def test_commands_that_need_no_torch_do_not_import_it(
    arguments: list[str], tmp_path: Path, toy_model: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data, train={"neftune_noise_alpha": 5.0})
    arguments = [str(config) if word == "CONFIG" else word for word in arguments]
    code = (
        "import sys, json\n"
        f"sys.argv = ['shardtune', *{arguments!r}]\n"
        "from shardtune.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "print('LOADED', json.dumps([code, sorted({m.split('.')[0] for m in sys.modules})]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    code_and_modules = json.loads(result.stdout.rsplit("LOADED", 1)[1])
    assert code_and_modules[0] in (0, None), result.stderr
    assert not {"torch", "transformers", "trl", "peft", "datasets", "numpy"} & set(code_and_modules[1])


@pytest.mark.parametrize(
    ("command", "stopped_in", "last"),
    [
        (
            "['export', 'RUN', '--to', 'merged']",
            "shardtune.export.run.export_model",
            "Interrupted; nothing was written.",
        ),
        (
            "['eval', 'RUN', '--data', 'x']",
            "shardtune.evaluation.evaluate.evaluate",
            "Interrupted; nothing was written.",
        ),
        ("['report', 'RUN']", "shardtune.report.runs.find_run", "Interrupted."),
    ],
)
def test_ctrl_c_is_answered_and_export_and_eval_say_that_nothing_was_written(
    command: str, stopped_in: str, last: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')
    (adapter / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    code = (
        "import importlib, sys\n"
        f"sys.argv = ['shardtune', *{command.replace('RUN', str(adapter))}]\n"
        f"module, _, name = {stopped_in!r}.rpartition('.')\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        "setattr(importlib.import_module(module), name, stop)\n"
        "from shardtune.cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (130, last)


@pytest.mark.parametrize("stopped_in", ["typer.main.get_params_from_function", "typer.Typer.command"])
def test_ctrl_c_before_the_command_line_is_read_ends_without_a_traceback(
    stopped_in: str, environment: dict[str, str]
) -> None:
    code = (
        "import sys, typer, typer.main\n"
        "sys.argv = ['shardtune', '--version']\n"
        "def stop(*_, **__): raise KeyboardInterrupt\n"
        f"{stopped_in} = stop\n"
        "from shardtune.__main__ import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_character_that_the_output_s_encoding_lacks_ends_no_command(environment: dict[str, str]) -> None:
    code = "import sys; sys.argv = ['shardtune', '--version']; from shardtune.__main__ import main\n"
    code += "try: main()\nexcept SystemExit: print('loss 5.8 → 5.6 ×')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, f"shardtune {__version__}\nloss 5.8 ? 5.6 ?\n"), result.stderr


@pytest.mark.slow
def test_debug_freq_and_nproc_are_overrides_that_the_config_remembers(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data, train={"max_steps": 1})
    result = shardtune("train", config, "--debug-freq", 7, "--nproc", 1, "--run-id", "one", "-v")
    assert result.returncode == 0, result.stderr
    written = (tmp_path / "runs" / "one" / "config.yaml").read_text()
    assert "debug_freq: 7 " in written and "# override: -o train.debug_freq=7" in written
    assert "1 per device" not in result.stdout and "2 per device × 1 process" in result.stdout
    assert "q_proj" in result.stdout and "trains    " in result.stdout
    for label in ("software  Python", "kernels   ", "weights   "):
        assert label in result.stdout, "-v prints everything"
    assert "step 1/1  loss" in result.stdout
