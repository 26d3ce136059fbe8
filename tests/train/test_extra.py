"""Every setting that `train.extra` passes on to TRL changes something that can be seen."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import run
from running import events
from shardtune.config.trl_fields import ALLOWED
from toys import toy_config

from shardtune.config import load_config
from shardtune.plan.steps import TrainingMath
from shardtune.train import loop
from shardtune.train.settings import trainer_settings

# One run with all of these, beside one without any; what hides or changes what others do has a run of its own.
TOGETHER: dict[str, Any] = {
    "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "lr_scheduler_kwargs": {"num_cycles": 2},
    "full_determinism": True, "torch_empty_cache_steps": 1, "dataloader_num_workers": 1,
    "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3, "eval_delay": 3, "eval_on_start": True,
    "logging_first_step": False,
}  # fmt: skip
ALONE: dict[str, Any] = {"neftune_noise_alpha": 50.0, "logging_strategy": "no", "data_seed": 7}
TRACKERS = {"run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"}
ELSEWHERE = {
    "router_aux_loss_coef": "tests/train/test_losses_runs.py",
    "tf32": "below",
    "dataloader_pin_memory": "our loader passes it on; torch takes no notice where there is no GPU",
}


def look(config: Path, name: str, extra: dict[str, Any]) -> dict[str, Any]:
    """What a run with these settings does, under the name of the setting that it should follow."""
    seen: dict[str, Any] = {"torch_empty_cache_steps": 0}
    prepare, make_loader = loop.ShardedSFTTrainer._prepare_for_training, loop.ShardedSFTTrainer.get_train_dataloader

    def prepared(self: Any, *args: Any) -> Any:
        found = prepare(self, *args)
        group = self.bare_optimizer.param_groups[0]
        seen.update(adam_beta1=group["betas"][0], adam_beta2=group["betas"][1], adam_epsilon=group["eps"])
        seen.update(data_seed=self.rows_of_step(1), full_determinism=torch.are_deterministic_algorithms_enabled())
        return found

    def loader(self: Any) -> Any:
        made = make_loader(self)
        names = ("num_workers", "persistent_workers", "prefetch_factor")
        seen.update({f"dataloader_{name}": getattr(made, name) for name in names})
        # Workers forked from a process of tests, with all its threads, may hang: the run itself has none.
        self.args.dataloader_num_workers, self.args.dataloader_prefetch_factor = 0, None
        self.args.dataloader_persistent_workers = False
        return make_loader(self)

    def clear() -> None:
        seen["torch_empty_cache_steps"] += 1

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC",
                         "FLASH_ATTENTION_DETERMINISTIC"):  # fmt: skip
            patch.setenv(variable, "0")  # `full_determinism` sets them: put back afterwards
        patch.setattr(loop.ShardedSFTTrainer, "_prepare_for_training", prepared)
        patch.setattr(loop.ShardedSFTTrainer, "get_train_dataloader", loader)
        patch.setattr("transformers.trainer.clear_device_cache", clear)
        try:
            assert run(config, *(f"train.extra.{key}={value}" for key, value in extra.items()), run_id=name) == 0
        finally:
            torch.use_deterministic_algorithms(False)
    steps, evaluated = events(config.parent / "runs" / name, "step"), events(config.parent / "runs" / name, "eval")
    return {
        **seen,
        "lr_scheduler_kwargs": steps[-1]["learning_rate"] if steps else None,
        "logging_first_step": [event["step"] for event in steps],
        "logging_strategy": [event["step"] for event in steps],
        "neftune_noise_alpha": steps[0]["loss"] if steps else None,
        "eval_delay": 2 in [event["step"] for event in evaluated],
        "eval_on_start": 0 in [event["step"] for event in evaluated],
    }


@pytest.fixture(scope="module")
def config(toy_model: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("extra"), toy_model, toy_data, data={"val_split": "validation"},
        train={"max_steps": 4, "eval_steps": 2, "logging_steps": 2, "lr_scheduler_type": "cosine"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def without(config: Path) -> dict[str, Any]:
    return look(config, "without", {})


@pytest.fixture(scope="module")
def together(config: Path) -> dict[str, Any]:
    return look(config, "together", TOGETHER)


@pytest.mark.parametrize("name", TOGETHER)
def test_it_changes_what_it_names(name: str, without: dict[str, Any], together: dict[str, Any]) -> None:
    assert together[name] != without[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_it_changes_what_it_names_alone(name: str, config: Path, without: dict[str, Any]) -> None:
    assert look(config, name, {name: ALONE[name]})[name] != without[name]


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_trackers_read_it(name: str) -> None:
    from transformers.integrations import integration_utils

    assert f"args.{name}" in inspect.getsource(integration_utils)


def test_tf32_switches_float32_products_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import training_args
    from trl import SFTConfig

    switched: list[bool] = []
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", switched.append)
    SFTConfig(output_dir=str(tmp_path), tf32=False, use_cpu=True, bf16=False)
    assert switched == [False]


def test_no_setting_is_passed_on_without_a_test() -> None:
    assert set(ALLOWED) == {*TOGETHER, *ALONE, *TRACKERS, *ELSEWHERE}


@pytest.mark.parametrize("name", [name for name, extra in ALLOWED.items() if "float" in extra.kinds])
def test_a_number_may_be_written_without_a_point(name: str, tmp_path: Path) -> None:
    file = toy_config(tmp_path, tmp_path, tmp_path, train={"eval_strategy": "no"})
    config = load_config(file, [f"train.extra.{name}=0"], environ={}).config
    math = TrainingMath(2, 1, 1, rows=4, tokens=40, epochs=1, steps_per_epoch=2, steps=2, warmup_steps=0)
    passed_on = getattr(trainer_settings(config, tmp_path, math, on_cpu=True), name)
    assert passed_on == 0 and isinstance(passed_on, float)
