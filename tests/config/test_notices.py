"""Is the user told of settings that change nothing?"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_configs import SMALLEST, Load

from shardtune.config import render_yaml


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.device_map=auto"], "model.device_map (auto) has no effect: FSDP2 places the weights."),
        (["model.use_cache=true"], "model.use_cache has no effect"),
        (["train.ddp_find_unused_parameters=false"], "train.ddp_find_unused_parameters has no effect"),
        (["cluster.image=i"], "the section `cluster` is not read by `train`"),
        (["train.warmup_steps=5", "train.warmup_ratio=0.05"], "train.warmup_ratio has no effect: train.warmup_steps is set"),
        (["train.lr_scheduler_type=constant", "train.warmup_ratio=0.05"], "train.warmup_ratio has no effect: the schedule `constant`"),
        (["train.max_steps=5", "train.num_train_epochs=1"], "train.num_train_epochs has no effect: train.max_steps is set"),
        (["data.text_field=x", "data.prompt_template={a}"], "data.text_field has no effect: the text comes from data.prompt_template"),
        (["data.text_field=x", "data.messages_field=m"], "data.text_field has no effect: data.messages_field"),
        (["data.text_field=x", "data.format=chat"], "data.text_field has no effect: data.format is chat."),
        (["train.eval_steps=5"], "train.eval_steps has no effect: there is no data.val_split."),
        (["train.eval_steps=5", "data.val_split=v", "train.eval_strategy=no"], "eval_strategy is no."),
        (["train.logging_steps=5", "train.logging_strategy=epoch"], "train.logging_steps has no effect: logging_strategy is epoch."),
        (["parallel.device=cpu", "train.tf32=true"], "train.tf32 has no effect: the device is a CPU"),
        (["parallel.device=cpu", "train.torch_empty_cache_steps=5"], "train.torch_empty_cache_steps has no effect"),
        (["train.save_steps=5", "train.save_strategy=epoch"], "train.save_steps has no effect: save_strategy is epoch."),
    ],
)  # fmt: skip
def test_a_setting_with_no_effect_is_told(load: Load, overrides: list[str], expected: str) -> None:
    notices = load(SMALLEST, overrides).notices
    assert len(notices) == 1
    assert expected in notices[0]


def test_a_revision_of_a_local_folder_is_told_and_of_a_hub_name_is_not(load: Load, folder: Path) -> None:
    (folder / "weights").mkdir()
    told = load(SMALLEST, ["model.model_name_or_path=weights", "model.revision=main"]).notices
    assert told == ("model.revision (main) has no effect: model_name_or_path is a local folder.",)
    assert load(SMALLEST, ["model.revision=main"]).notices == ()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.warmup_steps=5"],
        ["train.warmup_ratio=0.1"],
        ["model.device_map=null"],
        ["cluster.nodes=1"],
        ["cluster.nodes=2"],
        ["train.optim=sgd"],
    ],
)
def test_a_config_without_idle_settings_gets_no_notice(load: Load, overrides: list[str]) -> None:
    assert load(SMALLEST, overrides).notices == ()


def test_a_runs_own_config_gets_the_notices_of_the_config_it_was_made_from(load: Load) -> None:
    """It names every setting, and what it only repeats from the defaults was not asked for by anybody."""
    settings = ["train.max_steps=5", "train.warmup_steps=2", "train.save_strategy=no", "train.num_train_epochs=1"]
    first = load(SMALLEST, settings)
    assert [notice.split()[0] for notice in first.notices] == ["train.num_train_epochs"]
    assert load(render_yaml(first)).notices == first.notices
