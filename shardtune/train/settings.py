"""What is TRL told? The one place where our settings become its SFTConfig."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.config.schema import RunConfig
from shardtune.errors import UserInputError
from shardtune.plan.steps import TrainingMath

if TYPE_CHECKING:
    from trl import SFTConfig


_PASSED_ON = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_kwargs", "neftune_noise_alpha", "router_aux_loss_coef",
    "full_determinism", "tf32", "torch_empty_cache_steps", "data_seed", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "eval_delay", "eval_on_start", "logging_first_step",
    "logging_strategy", "run_name", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
)  # fmt: skip


def trainer_settings(config: RunConfig, run_folder: Path, math: TrainingMath, *, on_cpu: bool) -> SFTConfig:
    """TRL's settings for a model that is already adapted and sharded and data that is already tokenised.

    Raises:
        UserInputError: TRL or transformers refuses a value.
    """
    from trl import SFTConfig

    train = config.train
    ours = {
        "output_dir": str(run_folder),
        "num_train_epochs": train.num_train_epochs,
        "max_steps": train.max_steps,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "per_device_eval_batch_size": train.per_device_eval_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        # Selective recomputation is on the layers already (parallel/recompute.py): transformers is not told of it.
        "gradient_checkpointing": train.gradient_checkpointing is True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if train.gradient_checkpointing is True else None,
        # The same optimizer with the same state in one kernel; the two switch over freely.
        "optim": "adamw_torch_fused" if train.optim == "adamw_torch" and not on_cpu else train.optim,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler_type,
        "warmup_steps": math.warmup_steps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "logging_steps": train.logging_steps,
        "logging_nan_inf_filter": False,  # it would show an old loss while NaN reaches the weights
        "eval_strategy": train.eval_strategy,
        "eval_steps": train.eval_steps,
        "save_strategy": train.save_strategy,
        "save_steps": train.save_steps,
        "save_only_model": True,  # our store writes checkpoints; Trainer refuses to save a sharded model's optimizer
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "report_to": train.report_to,
        "seed": train.seed,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": train.dataloader_pin_memory and not on_cpu,
        **{name: getattr(train, name) for name in _PASSED_ON},
        "project": train.project or "huggingface",
        # Precision is FSDP2's (parallel/shard.py): autocast on top would round the reported loss to bf16.
        "bf16": False,
        "fp16": False,
        "disable_tqdm": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "max_length": None,
        "packing": False,
        "average_tokens_across_devices": True,
        "log_level": "error",
        "log_level_replica": "error",  # of every rank but the first; by default it warns
    }
    try:
        return SFTConfig(**ours)
    except (TypeError, ValueError) as error:
        raise UserInputError("TRL refuses the settings.", why=str(error).splitlines()[0]) from error


def check_trackers(report_to: str | list[str]) -> None:
    """Raise if a tracker is not installed. transformers would, with a traceback, once the model is loaded."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    wanted = {report_to} if isinstance(report_to, str) else set(report_to)
    installed = set(get_available_reporting_integrations())
    for name in sorted(wanted - installed - {"none", "all"}):
        known = name in INTEGRATION_TO_CALLBACK
        raise UserInputError(
            f"train.report_to: the tracker '{name}' is {'not installed' if known else 'unknown'}.",
            why=f"Installed here: {', '.join(sorted(installed)) or 'none'}.",
            fix=f"pip install {name}, or set train.report_to: none."
            if known
            else f"Known are: {', '.join(sorted(INTEGRATION_TO_CALLBACK))}, none.",
        )
