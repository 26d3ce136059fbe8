"""Words that several commands share, and a help that lists the settings from the fields themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--override", "-o", metavar="KEY=VALUE", help="Set one value, e.g. train.seed=1. Repeatable."),
]
AccelerateConfig = Annotated[
    Path | None,
    typer.Option(
        "--accelerate-config", metavar="FILE", help="Translate an accelerate FSDP file; every key gets a verdict."
    ),
]


class WithSettings(TyperCommand):
    """A command whose `--help` ends with every setting a config may hold, as the fields describe them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from rich.console import Console

        from shardtune.config.reference import settings_table

        Console().print(settings_table())
