"""`shardtune data`: prepare data ahead of time, and inspect it. Nothing is trained."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import Config, ConfigCommand, Overrides

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from shardtune.config.schema import DataSection, ModelSection, RunConfig
    from shardtune.data.checks import Finding, ModelLimits
    from shardtune.data.inspect import Report
    from shardtune.data.prepare import PreparedSet

app = typer.Typer(help="Prepare the training data ahead of time, and inspect it.", no_args_is_help=True)


class Split(StrEnum):
    train = "train"
    val = "val"


@app.command(cls=ConfigCommand)
def prepare(
    config: Config,
    override: Overrides = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Tokenizer processes; default: all cores.")
    ] = None,
) -> None:
    """Tokenize the data once, into the cache that `train` uses. The folder can be copied to another cluster.

    Exit codes: 0 ready, possibly with warnings; 2 invalid input, or data that `train` would refuse.
    """
    from rich.console import Console

    from shardtune.data.checks import enforce
    from shardtune.data.inspect_terminal import print_findings

    console = Console()
    run = _load(config, override)
    prepared, tokenizer = _prepare(run, console, workers)
    _print_prepared(console, prepared, run.data)
    print_findings(console, enforce(_findings(prepared, tokenizer, run.model)))


@app.command(cls=ConfigCommand)
def inspect(
    config: Config,
    override: Overrides = None,
    show: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="Print N rows with their supervised tokens marked.")
    ] = 0,
    split: Annotated[
        Split | None, typer.Option("--split", help="Only this split; default: statistics of both, rows of train.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write it as an HTML page.")] = None,
) -> None:
    """Show what is trained on: format, lengths, supervised tokens, and problems of the data.

    Exit codes: 0 fine, possibly with warnings; 2 invalid input, or data that `train` would refuse.
    """
    from rich.console import Console

    from shardtune.data.inspect_page import write_page
    from shardtune.data.inspect_terminal import print_report

    console = Console()
    run = _load(config, override)
    prepared, tokenizer = _prepare(run, console, None)
    report = _report(run, prepared, tokenizer, split, show)
    print_report(console, report)
    if html is not None:
        write_page(report, html)
        console.print(f"\npage: {html}", highlight=False, markup=False, soft_wrap=True)
    if any(finding.level == "error" for finding in report.findings):
        raise typer.Exit(2)


def _load(config: Path, override: list[str] | None) -> RunConfig:
    from shardtune.config import load_config

    return load_config(config, override or ()).config


def _prepare(run: RunConfig, console: Console, workers: int | None) -> tuple[PreparedSet, PreTrainedTokenizerBase]:
    from shardtune.data.prepare import prepare as prepare_set
    from shardtune.model.load import load_tokenizer  # brings torch
    from shardtune.observe.preparing import PreparingProgress

    tokenizer = load_tokenizer(run.model)
    name = run.model.tokenizer_name_or_path or run.model.model_name_or_path
    with PreparingProgress(console) as progress:
        prepared = prepare_set(run.data, run.train.seed, tokenizer, name, workers=workers, progress=progress)
    return prepared, tokenizer


def _findings(prepared: PreparedSet, tokenizer: PreTrainedTokenizerBase, model: ModelSection) -> list[Finding]:
    from shardtune.data.checks import refusals_and_warnings

    new_tokens = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in model.new_tokens}  # type: ignore[arg-type]
    return refusals_and_warnings(prepared, tokenizer, _limits(model), new_tokens)


def _limits(section: ModelSection) -> ModelLimits:
    """From the model's config.json; unknown where only the tokenizer is available, as before a download."""
    from transformers import AutoConfig

    from shardtune.data.checks import ModelLimits, model_positions
    from shardtune.model.locate import local_or_hub

    try:
        config = AutoConfig.from_pretrained(
            local_or_hub(section.model_name_or_path),
            revision=section.revision or "main",
            trust_remote_code=section.trust_remote_code,
        )
    except (OSError, ValueError, KeyError):
        return ModelLimits(None)
    size = getattr(config.get_text_config(), "vocab_size", None)
    return ModelLimits(int(size) if size else None, model_positions(config))


def _report(
    run: RunConfig, prepared: PreparedSet, tokenizer: PreTrainedTokenizerBase, split: Split | None, show: int
) -> Report:
    from shardtune.data.inspect import Report, count_split, format_found
    from shardtune.data.show_rows import show_rows
    from shardtune.errors import UserInputError

    found = {"train": prepared.train, **({"val": prepared.val} if prepared.val is not None else {})}
    if split is not None and split not in found:
        raise UserInputError("There are no validation rows.", why="data.val_split is null.", fix="Set data.val_split.")
    wanted = {name: rows for name, rows in found.items() if split in (None, name)}
    numbers = [count_split(rows, name, tokenizer, run.data.max_length) for name, rows in wanted.items()]
    format_name, format_why = format_found(prepared)
    return Report(
        source=source_name(run.data),
        format_name=format_name,
        format_why=format_why,
        folder=prepared.folder,
        from_cache=prepared.from_cache,
        overlap=prepared.overlap,
        splits=tuple(each for each in numbers if each is not None),
        findings=tuple(_findings(prepared, tokenizer, run.model)),
        shown_of=split or "train",
        rows=tuple(show_rows(found[split or "train"], show, tokenizer)),
    )


def source_name(section: DataSection) -> str:
    """The data in one line: a mixture's sources with their weights."""
    named = section.dataset_name_or_path
    if isinstance(named, str):
        return named
    return ", ".join(each if isinstance(each, str) else f"{each.path} × {each.weight:g}" for each in named)


def _print_prepared(console: Console, prepared: PreparedSet, section: DataSection) -> None:
    from shardtune.data.inspect import counts_line, format_found, format_line
    from shardtune.terminal import say

    say(console, "source", source_name(section))
    say(console, "format", format_line(*format_found(prepared)))
    for name, rows in (("train", prepared.train), ("val", prepared.val)):
        if rows is not None:
            say(console, "train" if name == "train" else "validate", counts_line(rows, section.max_length))
    say(console, "folder", f"{prepared.folder}" + (" (already prepared)" if prepared.from_cache else ""))
    _print_copy_hint(console, prepared.folder)


def _print_copy_hint(console: Console, folder: Path) -> None:
    from_here = shlex.quote(str(folder))
    lines = (
        "",
        "For a cluster without the data: copy the folder, and use it as the dataset; keep all other data settings.",
        f"  rsync -a {from_here} HOST:/shared/",
        f"  data.dataset_name_or_path: /shared/{folder.name}",
        "For a cluster that has the same data, copy it into the cache there:",
        f"  rsync -a --mkpath {from_here} HOST:/shared/cache/{folder.parent.name}/",
        "  data.cache_dir: /shared/cache",
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
