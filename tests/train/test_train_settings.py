"""The settings of `train` that once were TRL's: each changes what it names, seen from torch and the events of a run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from interrupted import run
from running import events
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toys import toy_config
from transformers import TrainerCallback

import shardtune
from shardtune.config import load_config
from shardtune.config.suggestions import section_fields
from shardtune.errors import UserInputError
from shardtune.plan.steps import training_math
from shardtune.train.callbacks import training_arguments, users_callbacks
from shardtune.train.setup import set_numerics

SETTINGS = {
    "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "lr_scheduler_kwargs": {"num_cycles": 0.25},
    "full_determinism": True, "dataloader_num_workers": 1, "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 3, "dataloader_pin_memory": False, "eval_delay": 3, "eval_on_start": True,
    "logging_first_step": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(toy_model: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("settings"), toy_model, toy_data, data={"val_split": "validation"},
        train={"max_steps": 4, "eval_steps": 2, "logging_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1},
    )  # fmt: skip


def trained(config: Path, name: str, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    assert run(config, *(f"train.{key}={value}" for key, value in settings.items()), run_id=name) == 0
    return {kind: events(config.parent / "runs" / name, kind) for kind in ("step", "eval")}


def test_a_run_does_what_the_settings_of_its_optimizer_schedule_loader_and_events_say(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC",
                     "FLASH_ATTENTION_DETERMINISTIC"):  # fmt: skip
        monkeypatch.setenv(variable, "0")  # `full_determinism` sets them: put back afterwards
    loaders: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    make = torch.utils.data.DataLoader.__init__

    def loader(self: Any, dataset: Any, **options: Any) -> None:
        loaders.append(dict(options))
        # Workers forked from a process of tests, with all its threads, may hang: the run itself has none.
        make(self, dataset, **{**options, "num_workers": 0, "prefetch_factor": None, "persistent_workers": False})

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups.append(optimizer.param_groups[0])

    monkeypatch.setattr(torch.utils.data.DataLoader, "__init__", loader)
    hook = register_optimizer_step_pre_hook(before_step)
    try:
        seen = trained(config, "all", SETTINGS)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        hook.remove()
        torch.use_deterministic_algorithms(False)
    assert groups[0]["betas"] == (0.8, 0.9) and groups[0]["eps"] == 1e-3
    workers = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory")
    assert {name: loaders[0][name] for name in workers} == dict(zip(workers, (1, True, 3, False), strict=True))
    assert [event["step"] for event in seen["step"]] == [2, 4]  # not the first
    assert [event["step"] for event in seen["eval"]] == [0, 4]  # before the first, and none before step 3
    # A quarter of a wave, of which two of three steps after the warm-up are taken: (1 + cos 60°) / 2.
    assert seen["step"][1]["learning_rate"] == pytest.approx(0.75e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("neftune_noise_alpha", 50.0), ("logging_strategy", "no"), ("data_seed", 7)]
)
def test_it_changes_the_losses_that_are_logged(config: Path, name: str, value: Any) -> None:
    plain = trained(config, f"without-{name}", {})["step"]
    changed = trained(config, f"with-{name}", {name: value})["step"]
    assert [event["loss"] for event in changed] != [event["loss"] for event in plain]


@pytest.mark.parametrize(("tf32", "expected"), [("true", "high"), ("false", "highest")])
def test_tf32_sets_the_precision_of_float32_products(config: Path, tf32: str, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        set_numerics(load_config(config, [f"train.tf32={tf32}"], environ={}).config.train)
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


READ_BY_TRACKERS = ["run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"]


@pytest.mark.parametrize("name", READ_BY_TRACKERS)
def test_trackers_read_it(name: str) -> None:
    from transformers.integrations import integration_utils

    assert f"args.{name}" in inspect.getsource(integration_utils)


# Refused where they are not their default, or accepted with a notice that they have no effect.
WITHOUT_EFFECT = {
    "model.device_map",
    "model.use_cache",
    "lora.task_type",
    "train.fp16",
    "train.ddp_find_unused_parameters",
}


def unread_settings(*sections: str, cluster: bool) -> set[str]:
    """Settings whose name stands nowhere in the code that could read them: cluster/ and its commands, or all else."""
    package = Path(shardtune.__file__).parent
    files = [file.relative_to(package) for file in package.rglob("*.py") if file.name != "changes.py"]
    folders = {"cluster", "cli", "plan"} if cluster else {file.parts[0] for file in files} - {"cluster", "config"}
    code = "".join((package / file).read_text(encoding="utf-8") for file in files if file.parts[0] in folders)
    names = {name for pair in re.findall(r"\.(\w+)|\"(\w+)\"", code) for name in pair}
    fields = section_fields()
    return {f"{section}.{key}" for section in sections for key in fields[section].model_fields if key not in names}


def test_every_setting_is_read_by_more_than_its_checks() -> None:
    unread = unread_settings(*(section for section in section_fields() if section != "cluster"), cluster=False)
    handed_over = {f"train.{name}" for name in (*READ_BY_TRACKERS, "logging_first_step")}  # in training_arguments
    assert unread - WITHOUT_EFFECT == handed_over


def test_every_setting_of_a_job_is_read_by_what_renders_it() -> None:
    assert unread_settings("cluster", cluster=True) == set()


def test_callbacks_and_trackers_see_the_settings_of_the_run(config: Path) -> None:
    settings = {"optim": "adamax", "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "save_total_limit": 2,
                "dataloader_num_workers": 1, "load_best_model_at_end": True, "gradient_checkpointing": "selective",
                "save_strategy": "steps", "save_steps": 2, "warmup_ratio": 0.5, "logging_first_step": False}  # fmt: skip
    run = load_config(config, [f"train.{key}={value}" for key, value in settings.items()], environ={}).config
    run = run.model_copy(
        update={
            "train": run.train.model_copy(
                update={"eval_strategy": "steps", "warmup_steps": None, "gradient_accumulation_steps": 1}
            )
        }
    )
    math = training_math(run.train, rows=8, tokens=80, processes=1)
    seen = training_arguments(run, config.parent, math, on_cpu=True).to_dict()
    assert {key: seen[key] for key in settings if key not in ("gradient_checkpointing", "warmup_ratio")} == {
        key: value for key, value in settings.items() if key not in ("gradient_checkpointing", "warmup_ratio")
    }
    assert seen["gradient_checkpointing"] is True and seen["warmup_steps"] == math.warmup_steps == 2
    assert (seen["eval_strategy"], seen["eval_steps"], seen["max_steps"]) == ("steps", 2, 4)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere:X", "cannot be imported"), (f"{__name__}:SETTINGS", "is not a transformers.TrainerCallback"),
     (f"{__name__}:NeedsMore", "cannot be made without arguments")],
)  # fmt: skip
def test_a_callback_that_cannot_be_used_is_refused_before_anything_is_loaded(name: str, problem: str) -> None:
    with pytest.raises(UserInputError, match=problem):
        users_callbacks([name])


class NeedsMore(TrainerCallback):
    def __init__(self, channel: str) -> None:
        self.channel = channel


class Recorder(TrainerCallback):
    """Named in a config by the test below."""

    seen: ClassVar[list[int]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.seen.append(state.global_step)


def test_a_run_that_does_not_improve_enough_stops_early_and_the_users_callback_sees_each_evaluation(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "seen", [])
    settings = {
        "early_stopping_patience": 2, "early_stopping_threshold": 100, "eval_steps": 1,
        "callbacks": f"['{__name__}:Recorder']",
    }  # fmt: skip
    seen = trained(config, "stops", settings)
    assert [event["step"] for event in seen["eval"]] == Recorder.seen == [1, 2, 3]  # the first sets the mark
    assert 4 not in [event["step"] for event in seen["step"]]
