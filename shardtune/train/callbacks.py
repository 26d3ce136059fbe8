"""Who else follows a run? Experiment trackers and users' own callbacks, through transformers' public interface."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import DefaultFlowCallback, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler, ExportableState

from shardtune.errors import UserInputError
from shardtune.terminal import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from shardtune.config.schema import RunConfig, TrainSection
    from shardtune.observe.profiler import LLMStepProfiler
    from shardtune.plan.steps import TrainingMath
    from shardtune.train.context import RunContext, Training


def check_callbacks(train: TrainSection) -> None:
    """Raise if a tracker is not installed or a callback cannot be imported: in seconds, before a model is loaded."""
    wanted = {train.report_to} if isinstance(train.report_to, str) else set(train.report_to)
    installed = set(get_available_reporting_integrations())
    for name in sorted(wanted - installed - {"none", "all"}):
        known = name in INTEGRATION_TO_CALLBACK
        raise UserInputError(
            f"train.report_to: the tracker '{name}' is {'not installed' if known else 'unknown'}.",
            why=f"Installed here: {', '.join(sorted(installed)) or 'none'}.",
            fix=f"pip install {name}, or set train.report_to: none."
            if known
            else f"Known trackers: {', '.join(sorted(INTEGRATION_TO_CALLBACK))}, none.",
        )
    users_callbacks(train.callbacks)


def users_callbacks(names: Sequence[str]) -> list[type[TrainerCallback]]:
    """The classes named in `train.callbacks`, each `module:Class`.

    Raises:
        UserInputError: one cannot be imported, or is not a TrainerCallback.
    """
    found = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserInputError(
                f"train.callbacks: '{name}' cannot be imported.",
                why=str(error),
                fix="Write module:Class, and put the module on PYTHONPATH or install it.",
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, TrainerCallback)):
            raise UserInputError(
                f"train.callbacks: '{name}' is not a transformers.TrainerCallback.",
                fix="Name a class that inherits from transformers.TrainerCallback; it is called without arguments.",
            )
        found.append(kind)
    return found


def callback_handler(training: Training, profiler: LLMStepProfiler, loader: Any) -> CallbackHandler:
    """What transformers' `Trainer` would call, in its order; the profiler first, so that trackers get its numbers.

    Optimizer and schedule are set when training begins, and again after a rollback.
    """
    setup, context = training.setup, training.context
    train = setup.config.train
    trackers = [kind() for kind in get_reporting_integration_callbacks(train.report_to)]
    for tracker in trackers:
        _survive_disk_errors(context, tracker)
    own = [kind() for kind in users_callbacks(train.callbacks)]
    handler = CallbackHandler(
        [profiler, DefaultFlowCallback(), *trackers, *own], setup.model, setup.tokenizer, None, None
    )
    handler.train_dataloader = loader
    profiler.is_attached = True
    return handler


def training_arguments(config: RunConfig, run_folder: Path, math: TrainingMath, *, on_cpu: bool) -> TrainingArguments:
    """The settings as callbacks expect them. The loop itself reads the config, except for when to log, evaluate and
    save: `DefaultFlowCallback` decides that, by these."""
    train = config.train
    names = ("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "data_seed")
    given = {name: getattr(train, name) for name in names if getattr(train, name) is not None}
    return TrainingArguments(
        **given,
        output_dir=str(run_folder),
        num_train_epochs=train.num_train_epochs,
        max_steps=math.steps,
        per_device_train_batch_size=train.per_device_train_batch_size,
        per_device_eval_batch_size=train.per_device_eval_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        gradient_checkpointing=train.gradient_checkpointing is True,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        lr_scheduler_kwargs=dict(train.lr_scheduler_kwargs),
        warmup_steps=math.warmup_steps,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm,
        logging_strategy=train.logging_strategy,
        logging_steps=train.logging_steps,
        logging_first_step=train.logging_first_step,
        eval_strategy=train.eval_strategy,
        eval_steps=train.eval_steps,
        eval_delay=train.eval_delay,
        eval_on_start=train.eval_on_start,
        save_strategy=train.save_strategy,
        save_steps=train.save_steps,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to=train.report_to,
        seed=train.seed,
        use_cpu=on_cpu,
        bf16=False,  # precision is FSDP2's (parallel/shard.py), not autocast's
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )


def callback_states(callbacks: Iterable[TrainerCallback]) -> dict[str, Any]:
    """What users' callbacks want to have kept in a checkpoint (transformers' `ExportableState`), by class."""
    return {type(one).__name__: one.state() for one in callbacks if isinstance(one, ExportableState)}


def restore_callbacks(callbacks: Iterable[TrainerCallback], saved: dict[str, Any]) -> None:
    for one in callbacks:
        for name, value in saved.get(type(one).__name__, {}).get("attributes", {}).items():
            setattr(one, name, value)


def _survive_disk_errors(context: RunContext, tracker: TrainerCallback) -> None:
    """A tracker whose disk or service is gone gets nothing more; the run continues without it."""
    failed: list[OSError] = []
    for name in filter(lambda name: name.startswith("on_"), dir(tracker)):
        setattr(tracker, name, partial(_call_unless_failed, context, getattr(tracker, name), failed))


def _call_unless_failed(
    context: RunContext, method: Callable[..., Any], failed: list[OSError], *args: Any, **more: Any
) -> Any:
    if failed:
        return None
    try:
        return method(*args, **more)
    except OSError as error:
        failed.append(error)
        tracker = type(method.__self__).__name__.removesuffix("Callback")  # type: ignore[attr-defined]
        text = f"{tracker} cannot be written: {error.strerror or error}. It gets nothing more from this run."
        warn(context.console, context.events, "report_to", text)
        return None
