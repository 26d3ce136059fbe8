"""`shardtune plan CONFIG`: will it fit, how long will it take, what will it send? Needs neither a GPU nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import AccelerateConfig, Config, Overrides

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.data.estimate import DataSize
    from shardtune.plan.report import Plan

_DOES_NOT_FIT = 1


def plan(
    config: Config,
    override: Overrides = None,
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus", metavar="NxNAME", help="GPUs of each node, such as 2xH200; default: those of this machine."
        ),
    ] = "",
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Number of machines.")] = 1,
    accelerate_config: AccelerateConfig = None,
    link: Annotated[
        str, typer.Option("--link", metavar="NAME", help="What connects the nodes: NDR, HDR, 100GbE, ….")
    ] = "",
    catalogue: Annotated[
        Path | None,
        typer.Option("--catalogue", metavar="FILE", help="GPUs and links to add to the known ones (docs/plan.md)."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also show alternatives: the fastest that fits first.")
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Prepare the data instead of estimating it, and trace the model's layer instead of using the table. "
            "Imports torch.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show whether a run fits, how long it takes and what it sends, before anything is started or loaded.

    From config.json and the headers of the weights alone. Every `auto` comes to what `train` would choose.

    Exit codes: 0 fits; 1 does not fit; 2 invalid input.
    """
    from shardtune.config import load_config

    asked = load_config(config, override or (), accelerate_config)
    planned = _plan(asked, gpus=gpus, nodes=nodes, link=link, catalogue=catalogue, exact=exact)
    if as_json:
        _print_json(planned, compare=compare)
    else:
        _print_page(planned, compare=compare)
    if not planned.fits:
        raise typer.Exit(_DOES_NOT_FIT)


def _plan(asked: ResolvedConfig, *, gpus: str, nodes: int, link: str, catalogue: Path | None, exact: bool) -> Plan:
    from shardtune.launch.named_paths import check_inputs
    from shardtune.observe.gpus import describe_gpus
    from shardtune.plan._pending import facts_of
    from shardtune.plan.report import assemble
    from shardtune.plan.target import target_of

    config = asked.config
    check_inputs(config)
    here = () if gpus else describe_gpus().get("gpus", ())
    target = target_of(config.parallel, here, gpus=gpus, nodes=nodes, link=link, catalogue=catalogue)
    folder = Path(config.model.model_name_or_path)
    data = _data(asked, folder)

    def fill_share() -> float:
        return data.fill(config.data.max_length, packed=False) if data is not None else 0.5

    facts = facts_of(config, folder, target.machine, fill_share)
    return assemble(asked.on_device(target.machine.device), facts, target.cluster, data)


def _data(asked: ResolvedConfig, folder: Path) -> DataSize | None:
    from shardtune.data.estimate import data_size

    named = asked.config.model.tokenizer_name_or_path
    return data_size(asked.config, Path(named).expanduser() if named else folder)


def _print_json(planned: Plan, *, compare: bool) -> None:
    import json

    from shardtune.plan.report import as_json

    typer.echo(json.dumps(as_json(planned), indent=2, ensure_ascii=False))


def _print_page(planned: Plan, *, compare: bool) -> None:
    from rich.console import Console

    from shardtune.plan.compare import alternatives, nearest_that_fits
    from shardtune.plan.page import show, show_alternatives

    console = Console()
    show(console, planned, None if planned.fits else nearest_that_fits(planned))
    if compare:
        show_alternatives(console, planned, alternatives(planned))
