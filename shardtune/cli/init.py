"""`shardtune init`: writes a config for a model, its data and the hardware."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import Overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.plan.facts import Machine
    from shardtune.plan.init_config import Choice, InitFacts, ModelFacts, PlanNotes

_OPTIONS = {"model.model_name_or_path": "--model", "data.dataset_name_or_path": "--data"}
_SOME_ROWS = 0.05  # for evaluation, until the data is known: its settings are not without effect before that


def init(
    model: Annotated[str, typer.Option("--model", metavar="PATH|HUB", help="Model folder or hub name.")],
    data: Annotated[str, typer.Option("--data", metavar="PATH|HUB", help="Training data: file, folder or hub name.")],
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="NxNAME", help="GPUs of each node, such as 2xH200; default: those here.")
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Number of machines.")] = 1,
    val: Annotated[str, typer.Option("--val", metavar="SPLIT|SHARE|null", help="Short for -o data.val_split=….")] = "",
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the config is written.")] = Path(
        "config.yaml"
    ),
    override: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write a commented config for a model, its data and the hardware, chosen from the plan.

    Looks at config.json, the headers of the weights and a sample of the data. Starts and downloads nothing.

    Exit codes: 0 written; 2 invalid input, or it cannot fit.
    """
    from shardtune.data.source import some_of
    from shardtune.launch.named_paths import check_inputs
    from shardtune.plan.init_config import choices, render_config

    _refuse_existing(output, force=force)
    named: list[Choice] = [("model.model_name_or_path", model, ""), ("data.dataset_name_or_path", data, "")]
    words = [*(override or ()), *([f"data.val_split={val}"] if val else [])]
    asked = _loaded([*named, ("data.val_split", _SOME_ROWS, "")], words)
    check_inputs(asked.config)
    facts, max_length = _facts(asked, gpus, nodes)
    found = [*named, *choices(facts, max_length)]
    notes = _notes(_loaded(found), gpus, nodes)
    commands = _next_commands(output, gpus, nodes)
    head = [f"Written by shardtune init for {facts.hardware}.", *notes.head, *(f"  {line}" for line in commands)]
    data_format = {"data.format": f"auto = {facts.format}."} if facts.format else {}
    _write(output, render_config(found, {**data_format, **notes.resolved}, head))
    val_split = next(choice for choice in found if choice[0] == "data.val_split")
    for notice in _loaded([*named, val_split], words).notices:
        typer.echo(f"notice    {notice}", err=True)
    if facts.unread:
        text = f"files with the columns of the data are not read: {some_of(facts.unread)}; they belong to no split"
        typer.echo(f"notice    {text} (docs/data.md).", err=True)
    if _folder(asked.config) is None:
        text = f"'{model}' is not on this machine: it is taken for a Hub name, and nothing is known of memory and time"
        typer.echo(f"notice    {text}.", err=True)
    typer.echo(f"{output} is written and valid. Next:")
    for line in commands:
        typer.echo(f"  {line}")


def _refuse_existing(output: Path, *, force: bool) -> None:
    from shardtune.errors import UserInputError

    if output.exists() and not force:
        raise UserInputError(f"'{output}' exists.", fix="Name another file with --output, or pass --force.")
    if not output.parent.is_dir():
        raise UserInputError(f"There is no folder '{output.parent}'.", fix="Create it, or name another --output.")


def _loaded(found: Sequence[Choice], overrides: Sequence[str] = ()) -> ResolvedConfig:
    """These settings, checked as a file with them would be."""
    from shardtune.config import load_config
    from shardtune.config.problems import ConfigError, Place
    from shardtune.plan.init_config import render_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(render_config(found, {}, []), encoding="utf-8")
        try:
            return load_config(file, overrides)
        except ConfigError as error:  # in words of the command line, not of that file
            problems = [
                replace(one, place=Place(_OPTIONS.get(one.key, "chosen by init"))) if one.place.kind == "file" else one
                for one in error.problems
            ]
            raise ConfigError(problems, "shardtune init") from None


def _facts(asked: ResolvedConfig, gpus: str, nodes: int) -> tuple[InitFacts, Choice]:
    """What is known of model, data and hardware, and the length that follows from the data."""
    from shardtune.data.estimate import data_size, sampled_rows
    from shardtune.data.inspect import format_line
    from shardtune.data.source import has_files, sources_of
    from shardtune.plan.init_config import InitFacts, choose_max_length

    config = asked.config
    given = {path: asked.value(path) for path, origin in asked.origins.items() if origin.source == "override"}
    folder = _folder(config)
    model = _model_facts(config, folder)
    named_tokenizer = config.model.tokenizer_name_or_path
    tokenizer = Path(named_tokenizer).expanduser() if named_tokenizer else folder
    sampled = sampled_rows(config.data, tokenizer)
    lengths, how = (sampled.lengths, sampled.how) if sampled is not None else ((), "")
    concatenated = sampled is not None and sampled.concatenated
    max_length = choose_max_length(lengths, how, model.context, concatenated=concatenated)
    if "data.max_length" in given:
        max_length = ("data.max_length", given["data.max_length"], "")
    named_split = config.data.val_split if isinstance(config.data.val_split, str) else None
    cut = config.data.model_copy(update={"max_length": max_length[1], "val_split": named_split})
    size = data_size(config.model_copy(update={"data": cut}), tokenizer)
    splits = [name for name in ("validation", "test") if all(has_files(one, name) for one in sources_of(cut))]
    facts = InitFacts(
        model=model,
        format=format_line(sampled.choice.name, sampled.choice.why) if sampled is not None else "",
        concatenated=concatenated,
        rows=size.rows if size is not None else None,
        sequences=size.sequences if size is not None else None,
        val_split=splits[0] if splits else None,
        machine=_machine(config, gpus, nodes),
        given=given,
        unread=sampled.unread if sampled is not None else (),
    )
    return facts, max_length


def _folder(config: RunConfig) -> Path | None:
    """Of the model's files; None where they are not on this machine."""
    from shardtune.errors import UserInputError
    from shardtune.model.locate import folder_on_disk

    try:
        return folder_on_disk(config.model)
    except UserInputError:
        return None


def _model_facts(config: RunConfig, folder: Path | None) -> ModelFacts:
    from shardtune.config.schema import ALL_LINEAR
    from shardtune.model.describe import describe
    from shardtune.plan.init_config import ModelFacts

    if folder is None:
        return ModelFacts()
    outline = describe(config.model, may_build=True)
    known = ModelFacts(
        parameters=outline.size,
        context=outline.config.get("max_position_embeddings"),
        has_experts=any(len(shape) == 3 for shape in outline.parameters.values()),
    )
    return replace(known, targets=ALL_LINEAR) if outline.family.inspected else known


def _machine(config: RunConfig, gpus: str, nodes: int) -> Machine:
    from shardtune.observe.gpus import describe_gpus
    from shardtune.plan.target import target_of

    here = () if gpus else describe_gpus().get("gpus", ())
    return target_of(config.parallel, here, gpus=gpus, nodes=nodes).machine


def _notes(asked: ResolvedConfig, gpus: str, nodes: int) -> PlanNotes:
    """What the plan says of these settings.

    Raises:
        UserInputError: they do not fit, or cannot be trained with there.
    """
    from shardtune.cli.plan import plan_of
    from shardtune.plan.init_config import PlanNotes, plan_notes

    if _folder(asked.config) is None:
        return PlanNotes(("The model is not on this machine, so nothing is known of memory and time.",))
    return plan_notes(plan_of(asked, gpus=gpus, nodes=nodes))


def _next_commands(output: Path, gpus: str, nodes: int) -> list[str]:
    file = shlex.quote(str(output))
    hardware = (f" --gpus {gpus}" if gpus else "") + (f" --nodes {nodes}" if nodes > 1 else "")
    where = f" --nnodes {nodes} --node-rank R --master-addr HOST" if nodes > 1 else ""
    return [f"shardtune plan {file}{hardware}", f"shardtune train {file}{where}"]


def _write(output: Path, text: str) -> None:
    """Only a config that can be read back."""
    from shardtune.config import load_config
    from shardtune.durable import write_output
    from shardtune.errors import UserInputError

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        load_config(file)
    try:
        write_output(output, text)
    except OSError as error:
        raise UserInputError(f"Could not write '{output}'.", why=f"{error.strerror}.") from error
