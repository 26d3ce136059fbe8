"""Do the settings fit together? Each check looks at a few settings that are valid on their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Any

from shardtune.config.optimizers import OPTIMIZERS, check_optim_args, check_optimizer
from shardtune.config.schedules import check_schedule_kwargs
from shardtune.config.schema import (
    EXPERTS,
    NO_DROPOUT,
    ROUTER,
    TARGET_WORDS,
    VOCABULARY,
    RunConfig,
    entries_of,
)
from shardtune.config.suggestions import nearest, section_fields


@dataclass(frozen=True)
class Finding:
    """Settings that do not fit together: the first path is the one to report, the others were looked at too."""

    paths: tuple[str, ...]
    what: str
    fix: str


def cross_checks(config: RunConfig) -> Iterator[Finding]:
    """Everything that is wrong between settings."""
    for check in CHECKS:
        yield from check(config)


def effective_eval_strategy(config: RunConfig) -> str:
    """`eval_strategy` with `auto` resolved: steps if there is a validation split, else no."""
    if config.train.eval_strategy == "auto":
        return "steps" if config.data.val_split is not None else "no"
    return config.train.eval_strategy


def half_precision(config: RunConfig) -> Iterator[Finding]:
    train = config.train
    if train.fp16 and train.bf16 is True:
        what = "bf16 and fp16 are both on; a run computes in one of them"
        yield Finding(("train.fp16", "train.bf16"), what, "keep bf16: true and remove fp16")
    elif train.fp16:
        what = "fp16 is not supported: it needs loss scaling, and overflows where bf16 does not"
        yield Finding(("train.fp16",), what, "use bf16: true")


def optimizer(config: RunConfig) -> Iterator[Finding]:
    train = config.train
    wrong = check_optimizer(train.optim)
    if wrong:
        yield Finding(("train.optim",), *wrong)
        return
    for key, what, fix in check_optim_args(train.optim, train.optim_args):
        yield Finding((f"train.optim_args.{key}", "train.optim"), what, fix)


def schedule(config: RunConfig) -> Iterator[Finding]:
    train = config.train
    wrong = check_schedule_kwargs(
        train.lr_scheduler_type,
        train.lr_scheduler_kwargs,
        learning_rate=train.learning_rate,
        steps=train.max_steps if train.max_steps > 0 else None,  # by epochs, once the rows are counted
        warmup_steps=train.warmup_steps or 0,
    )
    for key, what, fix in wrong:
        others = ("train.lr_scheduler_type", "train.learning_rate", "train.max_steps", "train.warmup_steps")
        yield Finding((f"train.lr_scheduler_kwargs.{key}", *others), what, fix)


def offloaded_inputs(config: RunConfig) -> Iterator[Finding]:
    train = config.train
    if train.offload_activations is True and train.gradient_checkpointing not in (True, "auto"):
        how = train.gradient_checkpointing or "none"
        what = f"it offloads the inputs of fully checkpointed layers, and gradient_checkpointing is {how}"
        fix = "set gradient_checkpointing: full, or remove offload_activations"
        yield Finding(("train.offload_activations", "train.gradient_checkpointing"), what, fix)


def patterns_compile(config: RunConfig) -> Iterator[Finding]:
    for pattern in config.model.ignore_tensors:
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"'{pattern}' is not a valid regular expression ({error})"
            yield Finding(("model.ignore_tensors",), what, r"write a literal bracket as \( or \[")


def adapter_targets(config: RunConfig) -> Iterator[Finding]:
    """What can be checked in lora.target_modules without the model."""
    lora = config.lora
    me = "lora.target_modules"
    entries = entries_of(lora.target_modules)
    for entry in entries:
        # A single word that is nearly one of ours is a typo: no architecture has a linear layer of such a name.
        single = re.fullmatch(r"[A-Za-z_ -]+", entry) is not None and entry not in TARGET_WORDS
        close = nearest(entry, TARGET_WORDS, cutoff=0.8) if single else None
        if close:
            yield Finding(
                (me,), f"'{entry}' is not one of the words ({', '.join(TARGET_WORDS)})", f"did you mean `{close}`?"
            )
        if entry in VOCABULARY:
            what = (
                f"'{entry}' cannot have an adapter: the fused loss reads the head's weight directly, and adapters on "
                "embeddings have no sharded form"
            )
            fix = "remove it; model.new_tokens learns new tokens, lora.modules_to_save trains the whole layer"
            yield Finding((me,), what, fix)
    if EXPERTS in entries and lora.experts is False:
        what = "it names the routed experts, but lora.experts is false"
        yield Finding((me, "lora.experts"), what, "remove `experts` from the targets, or lora.experts: false")
    fused = [word for word in (EXPERTS, ROUTER) if word in entries] or (["lora.experts"] if lora.experts else [])
    if fused and lora.lora_dropout > 0:
        what = f"lora_dropout is {lora.lora_dropout:g}, but {fused[0]} is set: {NO_DROPOUT}"
        yield Finding(("lora.lora_dropout", me, "lora.experts"), what, "set lora_dropout: 0")


def new_tokens(config: RunConfig) -> Iterator[Finding]:
    tokens = config.model.new_tokens
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if twice:
        yield Finding(("model.new_tokens",), f"listed twice: {', '.join(twice)}", "list each once")
    whole = [name for name in entries_of(config.lora.modules_to_save) if tokens and name in VOCABULARY]
    if whole:
        what = f"lora.modules_to_save already trains all rows of {whole[0]}"
        fix = "remove it from lora.modules_to_save: the rows of new tokens are trained"
        yield Finding(("model.new_tokens", "lora.modules_to_save"), what, fix)
    blank = [token for token in tokens if not token.strip()]
    if blank:
        yield Finding(("model.new_tokens",), f"{blank[0]!r} is blank", "use a distinct text such as <|tool|>")


def evaluation_needs_rows(config: RunConfig) -> Iterator[Finding]:
    if config.train.eval_strategy in ("steps", "epoch") and config.data.val_split is None:
        what = f"eval_strategy is {config.train.eval_strategy}, but data.val_split is not given: nothing to evaluate on"
        fix = "set data.val_split (such as validation, or train[90%:]), or eval_strategy: no"
        yield Finding(("train.eval_strategy", "data.val_split"), what, fix)


def best_checkpoint(config: RunConfig) -> Iterator[Finding]:
    train = config.train
    if not train.load_best_model_at_end:
        return
    me = "train.load_best_model_at_end"
    when = effective_eval_strategy(config)
    if config.data.val_split is None or when == "no":
        what = "the best checkpoint is the one with the lowest validation loss, and this run does not evaluate"
        fix = "set data.val_split and eval_strategy: steps, or load_best_model_at_end: false"
        yield Finding((me, "data.val_split", "train.eval_strategy"), what, fix)
    elif train.save_strategy != when:
        what = f"save_strategy is {train.save_strategy} but eval_strategy is {when}, so the best may not be saved"
        paths = (me, "train.save_strategy", "train.eval_strategy", "data.val_split")
        yield Finding(paths, what, f"set save_strategy: {when}")
    elif when == "steps" and train.save_steps % train.eval_steps:
        what = (
            f"save_steps ({train.save_steps}) is not a multiple of eval_steps ({train.eval_steps}), "
            "so some checkpoints would have no validation loss"
        )
        fix = f"set save_steps: {max(1, round(train.save_steps / train.eval_steps)) * train.eval_steps}"
        others = ("train.save_steps", "train.eval_steps", "train.eval_strategy", "data.val_split")
        yield Finding((me, *others), what, fix)


def loss_fits_format(config: RunConfig) -> Iterator[Finding]:
    """The supervised part must exist in the format, where the config names the format."""
    data = config.data
    paths = ("data.train_on", "data.format", "data.prompt_template")
    if data.train_on == "completion" and (data.format == "text" or data.format == "chat"):
        what = f"train_on is completion, but format {data.format} has no prompt and answer"
        yield Finding(paths, what, "set train_on: all" if data.format == "text" else "set train_on: assistant")
    if data.train_on == "assistant" and (data.format in ("text", "prompt") or data.prompt_template is not None):
        what = "train_on is assistant, but the rows are not conversations"
        yield Finding(paths, what, "set train_on: completion or all")
    if data.format == "prompt" and data.prompt_template is None:
        yield Finding(paths[1:], "format is prompt, but there is no prompt_template", "set prompt_template")
    if data.prompt_template is not None and data.format not in ("auto", "prompt"):
        what = f"prompt_template is given, but format is {data.format}"
        yield Finding(paths[:0:-1], what, "remove one of the two, or set format: prompt")


def template_names_columns(config: RunConfig) -> Iterator[Finding]:
    template = config.data.prompt_template
    if template is None:
        return
    paths = ("data.prompt_template",)
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        fix = "write {column} for a column and {{ or }} for a literal brace"
        yield Finding(paths, f"unbalanced braces ({error})", fix)
        return
    fields = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    if not fields:
        yield Finding(paths, "it has no {column}, so every row would be the same", "name the columns: '{text}'")
    for name, spec, conversion in fields:
        if not name.strip() or spec or conversion:
            given = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            fix = "write {column} with a plain column name, and {{ }} for literal braces"
            yield Finding(paths, f"{{{given}}} does not name a column", fix)


def warmup_needs_a_schedule_with_it(config: RunConfig) -> Iterator[Finding]:
    train = config.train
    ratio = train.warmup_ratio if train.warmup_ratio != _default("train.warmup_ratio") else 0
    if train.lr_scheduler_type == "constant" and (train.warmup_steps if train.warmup_steps is not None else ratio):
        name = "warmup_ratio" if train.warmup_steps is None else "warmup_steps"
        what = "no effect: the schedule `constant` has no warm-up"
        fix = f"set lr_scheduler_type: constant_with_warmup, or remove {name}"
        yield Finding((f"train.{name}", "train.lr_scheduler_type"), what, fix)


def callbacks_are_named(config: RunConfig) -> Iterator[Finding]:
    for name in config.train.callbacks:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            what = f"'{name}' is not of the form module:Class"
            yield Finding(("train.callbacks",), what, "write it like my_callbacks:SendLossToSlack")


@dataclass(frozen=True)
class Requirement:
    """Settings that mean nothing, or cannot work, unless `met`; only their defaults are accepted then.

    Args:
        decided_by: The settings that `met` looks at.
        what: Why; {section.key} is filled in.
        values: The values that need it; empty for all but the default.
    """

    settings: tuple[str, ...]
    met: Callable[[RunConfig], bool]
    decided_by: tuple[str, ...]
    what: str
    fix: str
    values: tuple[Any, ...] = ()


REQUIREMENTS = (
    Requirement(
        ("parallel.shard_size",),
        lambda config: config.parallel.shard == "hybrid",
        ("parallel.shard",),
        "no effect: parallel.shard is {parallel.shard}",
        "set shard: hybrid, or remove shard_size",
    ),
    Requirement(
        ("parallel.reshard_after_forward",),
        lambda config: config.parallel.shard != "replicate",
        ("parallel.shard",),
        "no effect: with shard: replicate no frozen weight is gathered",
        "remove it, or set shard: auto, full or hybrid",
    ),
    Requirement(
        ("model.load",),
        lambda config: config.parallel.shard != "full",
        ("parallel.shard",),
        "no effect: parallel.shard is full, so that no two processes hold the same weights",
        "set load: auto or read-all, or shard: replicate or hybrid",
        values=("read-once",),
    ),
    Requirement(
        ("guards.replica_check_steps",),
        lambda config: config.parallel.shard != "full",
        ("parallel.shard",),
        "no effect: with shard: full there is one replica of the base",
        "remove it, or set shard: auto, hybrid or replicate",
    ),
    Requirement(
        ("lora.use_dora",),
        lambda config: config.model.base_precision != "fp8",
        ("model.base_precision",),
        "DoRA needs the norm of every weight row in each pass, which is not implemented for weights in FP8",
        "set base_precision: bf16, or use_dora: false",
    ),
    Requirement(
        ("lora.use_dora",),
        lambda config: not config.lora.experts and not {EXPERTS, ROUTER} & set(entries_of(config.lora.target_modules)),
        ("lora.target_modules", "lora.experts"),
        "PEFT has no DoRA for routed experts and routers, which are fused tensors",
        "leave them out, or set use_dora: false with use_rslora: true and a higher r",
    ),
    Requirement(
        ("lora.modules_to_save",),
        lambda config: config.train.bf16 is not False or config.model.torch_dtype != "bfloat16",
        ("train.bf16", "model.torch_dtype"),
        "modules_to_save are float32, and train.bf16: false would mix them with the model's bfloat16 weights",
        "set train.bf16: auto, or model.torch_dtype: float32",
    ),
    Requirement(
        ("train.dataloader_prefetch_factor", "train.dataloader_persistent_workers"),
        lambda config: config.train.dataloader_num_workers > 0,
        ("train.dataloader_num_workers",),
        "no effect: dataloader_num_workers is 0",
        "set dataloader_num_workers too",
    ),
    Requirement(
        ("train.adam_beta1", "train.adam_beta2", "train.adam_epsilon"),
        lambda config: config.train.optim not in OPTIMIZERS or OPTIMIZERS[config.train.optim].uses_adam_settings,
        ("train.optim",),
        "no effect: train.optim is {train.optim}",
        "remove it, or set optim: adamw_torch",
    ),
    Requirement(
        ("train.label_smoothing_factor",),
        lambda config: config.train.loss == "nll",
        ("train.loss",),
        "label smoothing is defined for train.loss: nll only",
        "remove it, or set loss: nll",
    ),
    Requirement(
        ("train.eval_delay", "train.eval_on_start", "train.early_stopping_patience"),
        lambda config: effective_eval_strategy(config) != "no",
        ("train.eval_strategy", "data.val_split"),
        "no effect: this run does not evaluate",
        "set data.val_split and eval_strategy: steps, or remove it",
    ),
    Requirement(
        ("train.early_stopping_threshold",),
        lambda config: config.train.early_stopping_patience is not None,
        ("train.early_stopping_patience",),
        "no effect: early_stopping_patience is not set",
        "set early_stopping_patience too",
    ),
    Requirement(
        ("train.run_name",),
        lambda config: bool(_trackers(config) & {"all", "wandb", "mlflow", "trackio", "comet_ml", "swanlab"}),
        ("train.report_to", "train.callbacks"),
        "no effect: no tracker of train.report_to reads it",
        "set report_to: wandb (or mlflow, trackio, comet_ml, swanlab), or remove it",
    ),
    Requirement(
        ("train.project", "train.trackio_space_id", "train.trackio_bucket_id", "train.trackio_static_space_id"),
        lambda config: bool(_trackers(config) & {"all", "trackio"}),
        ("train.report_to", "train.callbacks"),
        "no effect: only trackio reads it, and train.report_to is {train.report_to}",
        "set report_to: trackio, or remove it",
    ),
    Requirement(
        ("train.sample_tokens",),
        lambda config: config.train.samples > 0,
        ("train.samples",),
        "no effect: train.samples is 0",
        "set samples too",
    ),
)  # fmt: skip


def requirements_are_met(config: RunConfig) -> Iterator[Finding]:
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    for requirement in REQUIREMENTS:
        for path in requirement.settings if not requirement.met(config) else ():
            section, _, name = path.partition(".")
            value = getattr(sections[section], name)
            if value in requirement.values if requirement.values else value != _default(path):
                yield Finding((path, *requirement.decided_by), requirement.what.format(**sections), requirement.fix)


def _default(path: str) -> Any:
    section, _, name = path.partition(".")
    return section_fields()[section].model_fields[name].get_default(call_default_factory=True)


def _trackers(config: RunConfig) -> set[str]:
    """Who reads a run's names: the trackers; a callback of the user's own may read all of them."""
    named = config.train.report_to
    return {"all"} if config.train.callbacks else {named} if isinstance(named, str) else set(named)


CHECKS: tuple[Callable[[RunConfig], Iterator[Finding]], ...] = (
    half_precision,
    optimizer,
    schedule,
    offloaded_inputs,
    patterns_compile,
    adapter_targets,
    new_tokens,
    evaluation_needs_rows,
    best_checkpoint,
    loss_fits_format,
    template_names_columns,
    warmup_needs_a_schedule_with_it,
    callbacks_are_named,
    requirements_are_met,
)
