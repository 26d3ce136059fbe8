"""Which settings have no effect? Those that configs from elsewhere often have are accepted, with a notice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from shardtune.config.cluster_schema import ClusterSection
from shardtune.config.cross_checks import effective_eval_strategy
from shardtune.config.references import as_text, written_settings
from shardtune.config.schema import RunConfig


def notices(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    """One sentence for each setting with no effect; `given` are the dotted paths that the user set."""
    chosen = _chosen(config, given)
    for notice in (_model, _warmup, _lengths, _columns, _intervals, _elsewhere):
        yield from notice(config, chosen)


def _chosen(config: RunConfig, given: Collection[str]) -> set[str]:
    """`given`, without the defaults of a section that is written in full, as a run's own config.yaml has them."""
    chosen = set(given)
    for section, values in config:
        fields = type(values).model_fields
        if all(f"{section}.{key}" in chosen for key in fields):
            default = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
            chosen -= {f"{section}.{key}" for key, value in values if value == default[key]}
    return chosen


def _model(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    model, written = config.model, as_text(written_settings(config))["model"]
    if model.device_map is not None:
        yield f"model.device_map ({written['device_map']}) has no effect: FSDP2 places the weights."
    if model.use_cache:
        yield "model.use_cache has no effect: the key/value cache is for generation."
    if model.revision is not None and Path(model.model_name_or_path).expanduser().is_dir():
        yield f"model.revision ({written['revision']}) has no effect: model_name_or_path is a local folder."


def _warmup(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    train = config.train
    if "train.warmup_ratio" in given and train.warmup_ratio > 0 and train.lr_scheduler_type == "constant":
        yield "train.warmup_ratio has no effect: the schedule `constant` has no warm-up."
    elif "train.warmup_ratio" in given and train.warmup_steps is not None:
        yield "train.warmup_ratio has no effect: train.warmup_steps is set and takes precedence."


def _lengths(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    if "train.num_train_epochs" in given and config.train.max_steps > 0:
        yield "train.num_train_epochs has no effect: train.max_steps is set and takes precedence."
    yield from template_notices(config.data.prompt_template)


def template_notices(template: str | None) -> Iterator[str]:
    """What `data.prompt_template` probably does not mean."""
    if "\\n" in (template or ""):
        yield (
            r"data.prompt_template has a backslash and an n, not a line break: YAML needs double quotes for \n; "
            r"a shell needs -o $'data.prompt_template={question}\n{answer}'."
        )


def _columns(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    data = config.data
    if data.text_field is not None and data.prompt_template is not None:
        yield "data.text_field has no effect: the text comes from data.prompt_template."
    elif data.text_field is not None and (data.messages_field is not None or data.format not in ("auto", "text")):
        why = (
            "data.messages_field names a column of messages"
            if data.format == "auto"
            else f"data.format is {data.format}"
        )
        yield f"data.text_field has no effect: {why}."


def _intervals(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    train = config.train
    when = {"logging": train.logging_strategy, "eval": effective_eval_strategy(config), "save": train.save_strategy}
    for what, strategy in when.items():
        if f"train.{what}_steps" in given and strategy != "steps":
            unset = what == "eval" and config.data.val_split is None
            why = "there is no data.val_split" if unset else f"{what}_strategy is {strategy}"
            yield f"train.{what}_steps has no effect: {why}."


def _elsewhere(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    if config.train.ddp_find_unused_parameters is not None:
        yield "train.ddp_find_unused_parameters has no effect: it is a DDP setting, and sharding is FSDP2."
    read = ClusterSection(nodes=config.cluster.nodes)  # in a pod, `train` compares the number of nodes
    if config.cluster != read and any(path.startswith("cluster.") for path in given):
        yield "the section `cluster` is not read by `train`; it describes the job for a scheduler."
