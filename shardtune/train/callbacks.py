"""Who else follows a run? Experiment trackers and users' own callbacks, through transformers' public interface."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import DefaultFlowCallback, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler, ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

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
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            raise UserInputError(
                f"train.callbacks: '{name}' cannot be made without arguments.",
                why=str(error),
                fix="Name a subclass whose __init__ sets them.",
            ) from error
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
    """The settings as callbacks and trackers read them. The loop itself reads the config, except for when to log,
    evaluate and save: `DefaultFlowCallback` decides that, by these."""
    train = config.train
    args = TrainingArguments(
        output_dir=str(run_folder),
        max_steps=math.steps,
        report_to=train.report_to,
        use_cpu=on_cpu,
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )
    # Set afterwards: TrainingArguments would act on some (tf32) and refuse others (an optimizer the Trainer does not
    # know), and these are only read.
    ours = {name: value for name, value in train if value is not None and hasattr(args, name)}
    ours |= {
        "output_dir": args.output_dir, "max_steps": math.steps, "report_to": args.report_to,
        "warmup_steps": math.warmup_steps, "gradient_checkpointing": bool(train.gradient_checkpointing),
        "eval_strategy": IntervalStrategy(train.eval_strategy), "save_strategy": SaveStrategy(train.save_strategy),
        "logging_strategy": IntervalStrategy(train.logging_strategy),
        "metric_for_best_model": "eval_loss", "greater_is_better": False,
    }  # fmt: skip
    for name, value in ours.items():
        setattr(args, name, value)
    return args


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
