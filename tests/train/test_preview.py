"""`config show --resolved` and `train` choose alike, because they ask the same resolver."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from interrupted import run
from resolving import GPU
from toys import save_toy, toy_config, toy_llama, toy_text_config
from typer.testing import CliRunner, Result

from shardtune.cli.main import app
from shardtune.errors import UserInputError


def show(config: Path, *overrides: str) -> Result:
    words = [word for override in overrides for word in ("-o", override)]
    return CliRunner().invoke(app, ["config", "show", str(config), "--resolved", *words])


def llama_in_bfloat16(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    toy_llama(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def without_packing(folder: Path) -> Path:
    from transformers import Qwen3NextForCausalLM

    return save_toy(Qwen3NextForCausalLM, toy_text_config("qwen3_next"), folder)


def test_a_run_writes_down_what_was_shown_before_it(toy_data: Path, tmp_path: Path) -> None:
    model = llama_in_bfloat16(tmp_path / "model")
    config = toy_config(tmp_path, model, toy_data, model={"torch_dtype": "auto"}, train={"max_steps": 1})
    shown = show(config)
    assert shown.exit_code == 0, shown.output
    assert run(config, run_id="one") == 0
    assert shown.stdout == (tmp_path / "runs" / "one" / "config.yaml").read_text()
    values = yaml.safe_load(shown.stdout)
    assert (values["model"]["torch_dtype"], values["train"]["bf16"]) == ("bfloat16", True)
    assert "# auto: the model is held in bfloat16" in shown.stdout


def test_a_family_without_packing_is_shown_with_the_reason_and_refused_when_asked(
    toy_data: Path, tmp_path: Path
) -> None:
    config = toy_config(tmp_path, without_packing(tmp_path / "model"), toy_data, lora={"r": 2})
    shown = show(config)
    assert yaml.safe_load(shown.stdout)["train"]["packing"] is False, shown.output
    (line,) = (line for line in shown.stdout.splitlines() if line.startswith("  packing:"))
    assert "# auto: " in line and len(line.partition("# auto: ")[2]) > 10
    asked = "train.packing=true"
    with pytest.raises(UserInputError) as refused:
        run(config, asked)
    assert str(show(config, asked).exception) == str(refused.value)


def test_a_target_that_matches_nothing_is_refused_before_any_data_is_read(
    toy_model: Path, toy_data: Path, tmp_path: Path, home: Path
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data, lora={"target_modules": ["nothing_like_it"]})
    with pytest.raises(UserInputError, match="nothing_like_it") as refused:
        run(config)
    assert str(show(config).exception) == str(refused.value)
    assert not list(home.rglob("set.json"))


def test_where_packing_depends_on_the_data_it_is_prepared_and_stdout_stays_yaml(
    toy_data: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtune.train.preview.machine_of", lambda *_: GPU)  # as on a machine with one
    model = llama_in_bfloat16(tmp_path / "model")
    shown = show(toy_config(tmp_path, model, toy_data, model={"torch_dtype": "auto"}))
    values = yaml.safe_load(shown.stdout)
    assert (values["train"]["packing"], values["model"]["attn_implementation"]) == (True, "shardtune_varlen")
    assert list(home.rglob("set.json"))
