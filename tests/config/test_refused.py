"""Is every setting of TRL ours by its name, or refused with what to use instead?"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_configs import SMALLEST, Report

import shardtune
from shardtune.config.optimizers import OPTIMIZERS
from shardtune.config.refused import OTHER_NAMES, TRL_NAMES
from shardtune.config.schema import TrainSection
from shardtune.config.suggestions import section_fields

ROOT = Path(shardtune.__file__).parents[1]


def test_every_field_of_the_installed_trl_is_a_setting_or_refused() -> None:
    from trl import SFTConfig

    fields = {field.name for field in dataclasses.fields(SFTConfig) if field.init}
    ours = {key: name for name, section in section_fields().items() for key in section.model_fields}
    assert fields - ours.keys() - TRL_NAMES.keys() == set(), "decide: a setting, or an entry in refused.TRL_NAMES"
    assert TRL_NAMES.keys() - fields == set(), "TRL no longer has these"
    assert not ours.keys() & {*TRL_NAMES, *OTHER_NAMES}
    # What the reference page says of the fields that it does not list.
    elsewhere = {key: ours[key] for key in fields & ours.keys() if ours[key] != "train"}
    assert elsewhere == {"max_length": "data", "trust_remote_code": "model", "use_cache": "model"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train: {chat_template_path: x}", "train.chat_template_path not a setting here: use `data.chat_template`"),
        ("push_to_hub: true", "run.yaml:3:1 push_to_hub not a setting here: shardtune uploads nothing"),
        ("train: {hub_token: x}", "set the environment variable HF_TOKEN"),
        ("train: {average_tokens_across_devices: false}", "always on: the loss is averaged over the supervised tokens"),
        ("train: {group_by_length: true}", "to save the padding that grouping by length is for, use `train.packing`"),
        ("train: {logging_dir: x}", "trackers write to the run folder; remove it"),
        ("train: {neftune_alpha: 5}", "unknown key; did you mean `neftune_noise_alpha`?"),
        ("train: {loss_type: dft}", "not a setting here: use `train.loss`"),
    ],
)
def test_a_name_of_trl_that_is_not_ours_is_answered_with_what_to_use(report: Report, line: str, expected: str) -> None:
    said = report(SMALLEST + line + "\n")
    assert "1 problem found" in said and expected in said


def test_train_extra_is_answered_once_with_where_each_of_its_settings_goes(report: Report) -> None:
    extra = "{adam_beta1: 0.8, max_length: 9, fsdp: full_shard, max_seq_length: 9, qqq: 1}"
    said = report(SMALLEST + f"train:\n  seed: 1\n  extra: {extra}\n")
    assert "1 problem found" in said
    assert (
        "run.yaml:5:3 train.extra `train.extra` is gone: write `train.adam_beta1`, `data.max_length`; `fsdp` is not a setting here"
        in said
    )
    assert "`fsdp` is not a setting here (shardtune shards with FSDP2; use the section `parallel`); " in said
    assert "`max_seq_length` is not a setting here (did you mean `data.max_length`?); `qqq` is not" in said


@pytest.mark.parametrize("nothing", ["{}", "null", "5"])
def test_an_empty_train_extra_is_to_be_removed(report: Report, nothing: str) -> None:
    assert "train.extra `train.extra` is gone: remove it" in report(SMALLEST + f"train: {{extra: {nothing}}}\n")


def test_the_description_of_optim_names_every_optimizer() -> None:
    description = TrainSection.model_fields["optim"].description or ""
    assert [name for name in OPTIMIZERS if name not in description] == []


def test_loading_a_config_imports_neither_torch_nor_transformers(folder: Path) -> None:
    (folder / "run.yaml").write_text(SMALLEST + "train: {adam_beta1: 0.8, optim_args: {amsgrad: true}}\n")
    (folder / "bad.yaml").write_text(SMALLEST + "train: {fsdp: full_shard}\n")
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
