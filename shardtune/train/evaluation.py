"""What is the loss of a model, with or without an adapter, where nothing is trained? As a run would measure it."""

from __future__ import annotations

import json
import math
import signal
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key
from rich.console import Console

from shardtune import terminal
from shardtune.adapters.peft_form import adapted_ranks
from shardtune.checkpoint.adapter import AdapterMismatchError, check_adapter_matches, load_adapter, read_adapter
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.observe.events import EventLog
from shardtune.parallel.exchange import tensor_from_spec, tensor_spec
from shardtune.run.base_model import compare_bases
from shardtune.run.evaluation import adapter_folder, refuse_damaged
from shardtune.run.exit_codes import DONE, INTERRUPTED, PREEMPTED
from shardtune.run.watchdog import EVALUATING
from shardtune.train.batches import eval_loader
from shardtune.train.context import RunContext
from shardtune.train.validation import EvaluationStopped, validate

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.config.schema import RunConfig
    from shardtune.parallel.processes import Processes
    from shardtune.run.evaluation import Evaluation
    from shardtune.run.stop_request import StopRequest
    from shardtune.run.watchdog import Watchdog
    from shardtune.train.setup import Setup

_SAME = ("peft_type", "bias", "use_dora", "trainable_token_indices")  # of the others, names and shapes tell


@dataclass(frozen=True)
class GivenAdapter:
    """An adapter that fits: its tensors on rank 0, their shapes (`meta`) elsewhere; what to say of its base model."""

    path: str
    tensors: dict[str, torch.Tensor]
    notices: list[str]


def temporary_run(asked: RunConfig, processes: Processes, evaluation: Evaluation, at_end: ExitStack) -> RunContext:
    """A place for a rank's files that is gone with the evaluation: only its result is wanted.

    Raises:
        UserInputError: there is nothing to evaluate on.
    """
    if asked.data.val_split is None:
        raise UserInputError(
            "There is nothing to evaluate on: data.val_split is null.",
            fix="Set data.val_split, for instance -o data.val_split=validation, or =train for the training rows.",
        )
    folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="shardtune-"))) / "eval-loss"
    folder.mkdir()
    console = Console(quiet=not processes.is_main, stderr=evaluation.as_json)
    return RunContext(processes, folder, console, EventLog(folder, processes.rank), asked, temporary=True)


def evaluate_only(context: RunContext, setup: Setup, stop: StopRequest, watchdog: Watchdog, *, as_json: bool) -> int:
    """Evaluate once and print the result; returns the exit code.

    Without an adapter the fresh ones of the config are on the model, which change nothing: their B is zero.
    """
    config, data, adapter = setup.config, setup.data, setup.adapter
    assert data.val is not None
    if adapter is not None:
        load_adapter(setup.model, adapter.tensors)
    processes = context.processes
    try:
        found = validate(
            setup.model, setup.loss, eval_loader(data, config.train, processes), processes,
            before_batch=lambda: watchdog.enter(EVALUATING), stopped=lambda: processes.agree(stop.requested),
        )  # fmt: skip
    except EvaluationStopped:
        context.console.print("Stopped on request; the evaluation was not finished.")
        return INTERRUPTED if processes.agree(stop.signal == signal.SIGINT) else PREEMPTED
    if not math.isfinite(found.loss):
        raise ShardtuneError(
            f"Eval loss is {found.loss}.",
            why="The model, or the adapter, computes numbers that are not finite on these rows.",
            fix="Evaluate without --adapter to see which of them it is.",
            code="loss-nan",
        )
    counts = data.val.prepared.counts
    result = {
        "model": config.model.model_name_or_path,
        "adapter": adapter.path if adapter is not None else None,
        "eval_loss": found.loss,
        "mean_token_accuracy": found.mean_token_accuracy,
        "entropy": found.entropy,
        "perplexity": math.exp(min(found.loss, 700.0)),  # beyond, a float has no number for it
        "supervised_tokens": found.tokens,
        "tokens": counts.tokens,
        "rows": counts.rows,
        "processes": context.processes.world_size,
    }
    if context.processes.is_main:
        _say(context, result, as_json=as_json)
    return DONE


def _say(context: RunContext, result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    terminal.say(context.console, "adapter", result["adapter"] or "none: the model as it is")
    terminal.say(
        context.console,
        "eval",
        f"{terminal.count(result['rows'], 'row')}, {result['supervised_tokens']:,} supervised tokens",
    )
    accuracy = terminal.percent(result["mean_token_accuracy"])
    text = f"{result['eval_loss']:.4f}, perplexity {result['perplexity']:,.2f}, token accuracy {accuracy}"
    terminal.say(context.console, "loss", text)


def read_given(processes: Processes, model: PeftModel, base: str, given: Path) -> GivenAdapter:
    """Read a PEFT adapter and compare it with what the config means, before any weight of the model is read.

    A collective; rank 0 alone reads, so that nodes need not share a disk.

    Args:
        base: The model as the config names it.

    Raises:
        UserInputError: there is none, or it is of other settings than the config's; with the same words on every rank.
    """
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, Any] = {}
    if processes.is_main:
        try:
            folder = adapter_folder(given)
            refuse_damaged(folder.absolute())
            config = _read_config(folder)
            held_in = Path(model.base_model.model.name_or_path)
            named = config.base_model_name_or_path
            notice = compare_bases(folder.absolute(), named, base, held_in, option="model.model_name_or_path")
            _refuse_other_settings(model, config, folder)
            tensors = read_adapter(folder)
            check_adapter_matches(model, tensors)
            outlines = {name: tensor_spec(tensor) for name, tensor in tensors.items()}
            found = {"path": str(folder), "tensors": outlines, "notices": [notice] if notice else []}
        except AdapterMismatchError as error:
            what = f"--adapter: '{folder}' does not fit the model that the config describes."
            found = {"error": [what, error.why, "Set lora.target_modules to what it was trained with."]}
        except UserInputError as error:
            found = {"error": [error.what, error.why, error.fix]}
    found = processes.share_from_main(found)
    if "error" in found:
        what, why, fix = found["error"]
        raise UserInputError(what, why=why, fix=fix)
    tensors = tensors or {name: tensor_from_spec(one) for name, one in found["tensors"].items()}
    return GivenAdapter(found["path"], tensors, found["notices"])


def _read_config(folder: Path) -> PeftConfig:
    try:
        return PeftConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserInputError(
            f"--adapter: the settings of '{folder}' cannot be read.",
            why=str(error).splitlines()[0],
            fix="Use an adapter that the installed PEFT can load.",
        ) from error


def _refuse_other_settings(model: PeftModel, given: PeftConfig, folder: Path) -> None:
    """Tensors of the right names and shapes mean something else under another scale."""
    own = model.peft_config["default"]
    other = [
        f"{name} is {getattr(given, name, None)!r} there and {getattr(own, name, None)!r} here"
        for name in _SAME
        if (getattr(given, name, None) or None) != (getattr(own, name, None) or None)
    ]
    if isinstance(given, LoraConfig) and not other:
        ranks = adapted_ranks(model)
        for number, name in enumerate(("rank", "scale (lora_alpha, use_rslora)")):
            wrong = [
                place for place, here in ranks.items() if not math.isclose(_ranks(given, place)[number], here[number])
            ]
            if wrong:
                there, here = _ranks(given, wrong[0])[number], ranks[wrong[0]][number]
                other.append(f"the {name} of {wrong[0]} is {there:g} there and {here:g} here")
    if other:
        raise UserInputError(
            f"--adapter: '{folder}' does not match the config's `lora` section.",
            why="; ".join(other) + ".",
            fix="Set the `lora` section (and model.new_tokens) to what its adapter_config.json says.",
        )


def _ranks(config: LoraConfig, place: str) -> tuple[int, float]:
    """Rank and scale of the adapter that PEFT would make at a place."""
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), place), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), place), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)
