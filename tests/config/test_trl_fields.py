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
from shardtune.config.suggestions import section_fields
from shardtune.config.trl_fields import ALLOWED, REFUSED

ROOT = Path(shardtune.__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("adam_bta1", "1", "TRL has no such setting that could be passed on; did you mean `adam_beta1`?"),
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
        ("adam_beta1", "high", "expected a number, at least 0, below 1; got 'high'"),
        ("adam_beta1", "true", "expected a number, at least 0, below 1; got true"),
        ("logging_first_step", "yes", "expected true or false; got 'yes'"),
        ("dataloader_num_workers", "1.5", "expected a whole number, at least 0; got 1.5"),
        ("lr_scheduler_kwargs", "[1]", "expected a mapping, or null; got [1]"),
        ("logging_strategy", "step", "expected one of: no, steps, epoch; got 'step'; did you mean `steps`?"),
        ("adam_beta1", "null", "expected a number, at least 0, below 1; got nothing (null)"),
        ("adam_beta2", "1.5", "expected a number, at least 0, below 1; got 1.5"),
        ("dataloader_persistent_workers", "true", "there are no workers; set train.extra.dataloader_num_workers too"),
        ("loss_type", "dft", "the loss is the negative log-likelihood of the supervised tokens"),
        ("label_smoothing_factor", "0.1", "gives no logits to smooth"),
        ("train_sampling_strategy", "group_by_length", "`train.packing` saves the padding that grouping by length is for"),
        ("group_by_length", "true", "`train.packing` saves the padding that grouping is for"),
        ("push_to_hub", "true", "nothing would be pushed"),
    ],
)  # fmt: skip
def test_what_cannot_be_passed_on_is_refused_with_the_reason(
    report: Report, name: str, value: str, expected: str
) -> None:
    said = report(SMALLEST + f"train:\n  extra:\n    {name}: {value}\n")
    assert f"run.yaml:5:5 train.extra.{name}" in said
    assert expected in said


def test_what_has_an_effect_is_passed_on_as_it_is(load: Load) -> None:
    text = "train:\n  extra: {adam_beta1: 0, run_name: null, dataloader_num_workers: 2, lr_scheduler_kwargs: {a: 1}}\n"
    assert load(SMALLEST + text).config.train.extra == {
        "adam_beta1": 0, "run_name": None, "dataloader_num_workers": 2, "lr_scheduler_kwargs": {"a": 1},
    }  # fmt: skip


def test_every_setting_of_the_installed_trl_is_ours_or_allowed_or_refused_with_a_reason() -> None:
    from trl import SFTConfig

    ours = {key for section in section_fields().values() for key in section.model_fields}
    fields = {field.name for field in dataclasses.fields(SFTConfig) if field.init}
    assert fields - ours - set(ALLOWED) - set(REFUSED) == set()
    assert (set(ALLOWED) | set(REFUSED)) - fields == set()  # none that TRL no longer has
    assert not set(ALLOWED) & set(REFUSED) and not ours & (set(ALLOWED) | set(REFUSED))
    assert all(len(why.split()) >= 2 for why in REFUSED.values())


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
