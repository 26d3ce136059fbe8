"""`shardtune config`: show, validate, schema, reference. Starts nothing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import AccelerateConfig, Config, ConfigCommand, Overrides
from shardtune.terminal import count

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig

app = typer.Typer(help="Check a config and show all its settings.", no_args_is_help=True)


@app.command(cls=ConfigCommand)
def show(
    config: Config,
    override: Overrides = None,
    accelerate_config: AccelerateConfig = None,
    resolve: Annotated[
        bool,
        typer.Option(
            "--resolved",
            help="With every auto replaced by what a run on this machine would choose, and why. Reads the model config "
            "and, if a choice depends on it, prepares the data; reads no weights.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Values, origins, notices and verdicts as JSON.")] = False,
) -> None:
    """Print every setting, and where its value comes from.

    Exit codes: 0 ok; 2 there are problems (with --resolved, also what `train` would refuse).
    """
    from shardtune.config import load_config, render, render_yaml

    resolved = load_config(config, override or (), accelerate_config)
    if resolve:
        resolved = _resolved(resolved)
    if as_json:
        typer.echo(json.dumps(render.as_json(resolved), indent=2, ensure_ascii=False))
        return
    if sys.stdout.isatty():
        for text, comment in render.render_lines(resolved):
            dimmed = typer.style(f"  # {comment}", dim=True) if comment else ""
            typer.echo(f"{text:<{render.COMMENT_COLUMN}}{dimmed}" if comment else text)
    else:
        typer.echo(render_yaml(resolved), nl=False)
    for notice in resolved.notices:
        typer.echo(f"notice: {notice}", err=True)


@app.command(cls=ConfigCommand)
def validate(
    config: Config,
    override: Overrides = None,
    accelerate_config: AccelerateConfig = None,
    paths: Annotated[
        bool, typer.Option("--paths/--no-paths", help="Check local paths; --no-paths for another machine's config.")
    ] = True,
) -> None:
    """Check a config, and the paths in it once its settings are valid. Nothing is downloaded or loaded.

    All problems of the settings are listed at once, and so are those of the paths.

    Exit codes: 0 ok; 2 there are problems.
    """
    from shardtune.config import ConfigError, load_config
    from shardtune.launch.named_paths import check_named_paths, not_checked

    try:
        resolved = load_config(config, override or (), accelerate_config)
        if paths:
            check_named_paths(resolved, config)
    except ConfigError as error:
        raise ConfigError(error.problems, error.subject, whole=True) from None
    typer.echo(f"ok: {config}: {_summary(resolved)}")
    for notice in resolved.notices:
        typer.echo(f"notice: {notice}")
    unknown = not_checked(resolved.config) if paths else ["any path", *not_checked(resolved.config)]
    typer.echo(f"not checked: {'; '.join(unknown)}")
    if resolved.verdicts:
        from rich.console import Console

        from shardtune.config.accelerate_file import verdict_table

        Console().print(verdict_table(resolved.verdicts))


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors."""
    from shardtune.config.reference import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def reference() -> None:
    """Print the reference page of all settings (Markdown)."""
    from shardtune.config.reference import reference_page

    typer.echo(reference_page(), nl=False)


def _resolved(asked: ResolvedConfig) -> ResolvedConfig:
    import os

    from shardtune.launch.named_paths import check_inputs
    from shardtune.launch.safe_defaults import set_safe_defaults
    from shardtune.launch.start import processes_for

    set_safe_defaults(os.environ)
    check_inputs(asked.config)
    here, everywhere = processes_for(asked, os.environ)
    from shardtune.train.preview import resolve_here  # brings torch

    return resolve_here(asked, processes_here=here, world_size=everywhere)


def _summary(resolved: ResolvedConfig) -> str:
    run = resolved.config
    epochs = run.train.num_train_epochs
    length = f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
    if run.train.max_steps > 0:
        length = count(run.train.max_steps, "step")
    return (
        f"{run.model.model_name_or_path}, LoRA r={run.lora.r}, on {run.data.dataset_name_or_path}, "
        f"{length}, learning rate {run.train.learning_rate:g}"
    )
