"""Is train.extra checked against the TRL that is installed, without importing it?"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_configs import SMALLEST, Load, Report

import shardtune
from shardtune.config import trl_fields as module
from shardtune.config.suggestions import section_fields
from shardtune.config.trl_fields import OWNED, TrlSourceError, trl_fields

ROOT = Path(shardtune.__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("adam_bta1", "1", "TRL's SFTConfig has no such setting; did you mean `adam_beta1`?"),
        ("learning_rate", "1", "shardtune has a setting of its own for this; set `train.learning_rate`"),
        ("max_length", "1", "set `data.max_length`"),
        ("trust_remote_code", "true", "set `model.trust_remote_code`"),
        ("warmup_ratio", "0.1", "set `train.warmup_ratio`"),
        ("max_seq_length", "9", "set `data.max_length`"),
        ("output_dir", "x", "set `train.output_dir`"),
        ("fsdp", "full_shard", "this setting cannot be passed on; shardtune shards the model itself"),
        ("deepspeed", "x", "shardtune shards with FSDP2 only"),
        ("dataset_text_field", "x", "use `data.text_field`"),
        ("activation_offloading", "true", "use `train.offload_activations`"),
        ("padding_free", "true", "follows from train.packing"),
        ("hub_token", "x", "set the environment variable HF_TOKEN"),
        ("logging_dir", "x", "transformers no longer has it"),
        ("adam_beta1", "high", "expected a number; got 'high'"),
        ("adam_beta1", "true", "expected a number; got true"),
        ("logging_first_step", "yes", "expected true or false; got 'yes'"),
        ("dataloader_num_workers", "1.5", "expected a whole number; got 1.5"),
        ("lr_scheduler_kwargs", "[1]", "expected a mapping, or text, or null; got [1]"),
        ("loss_type", "nl", "expected one of: nll, dft, chunked_nll; got 'nl'; did you mean `nll`?"),
        ("adam_beta1", "null", "expected a number; got nothing (null)"),
    ],
)  # fmt: skip
def test_what_cannot_be_passed_on_is_refused_with_the_reason(
    report: Report, name: str, value: str, expected: str
) -> None:
    said = report(SMALLEST + f"train:\n  extra:\n    {name}: {value}\n")
    assert f"run.yaml:5:5 train.extra.{name}" in said
    assert expected in said


def test_what_trl_knows_is_passed_on_as_it_is(load: Load) -> None:
    text = "train:\n  extra: {adam_beta1: 1, run_name: null, push_to_hub: true, hub_model_id: me/x, lr_scheduler_kwargs: {a: 1}}\n"
    assert load(SMALLEST + text).config.train.extra == {
        "adam_beta1": 1, "run_name": None, "push_to_hub": True, "hub_model_id": "me/x", "lr_scheduler_kwargs": {"a": 1},
    }  # fmt: skip


def test_every_owned_name_is_one_that_trl_has_and_none_that_shardtune_has_itself() -> None:
    modelled = {key for section in section_fields().values() for key in section.model_fields}
    assert not set(OWNED) - set(trl_fields())
    assert not set(OWNED) & modelled


@pytest.mark.slow
def test_the_fields_read_from_the_source_are_those_of_the_real_dataclass() -> None:
    trl = pytest.importorskip("trl")
    real = {field.name for field in dataclasses.fields(trl.SFTConfig) if field.init}
    assert set(trl_fields()) == real


def test_without_trl_the_user_is_told_that_nothing_was_checked(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    trl_fields.cache_clear()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    resolved = load(SMALLEST + "train: {extra: {anything: 1}}\n")
    assert resolved.notices == ("train.extra could not be checked against TRL: the package trl is not installed.",)


def test_a_trl_laid_out_differently_is_said_not_to_be_understood(tmp_path: Path) -> None:
    (tmp_path / "sft_config.py").write_text("from elsewhere import Base\nclass SFTConfig(Base):\n    x: int = 1\n")
    with pytest.raises(TrlSourceError, match="the base class Base"):
        module._class_fields(tmp_path / "sft_config.py", "SFTConfig")
    with pytest.raises(TrlSourceError, match="has no class Missing"):
        module._class_fields(tmp_path / "sft_config.py", "Missing")


def test_loading_a_config_with_extra_and_a_wrong_key_imports_neither_torch_nor_transformers(folder: Path) -> None:
    (folder / "run.yaml").write_text(SMALLEST + "train: {extra: {adam_beta1: 0.8}}\n")
    (folder / "bad.yaml").write_text(SMALLEST + "train: {adam_beta1: 0.8}\n")
    code = (
        "import sys; from pathlib import Path; from shardtune.config import ConfigError, load_config, render_yaml\n"
        "print(render_yaml(load_config(Path('run.yaml'))).count('adam_beta1: 0.8'))\n"
        "try: load_config(Path('bad.yaml'))\n"
        "except ConfigError: print('refused')\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'accelerate', 'rich') if name in sys.modules])"
    )
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.split("\n")[:3] == ["1", "refused", "[]"]
