"""`shardtune plan CONFIG`: will it fit, how long will it take, what will it send? Needs neither a GPU nor torch."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import AccelerateConfig, Config, Overrides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.data.estimate import DataSize
    from shardtune.model.safetensors_headers import StoredTensor
    from shardtune.plan.report import Plan

_DOES_NOT_FIT = 1
_UNKNOWN_FILL = 0.5  # of data that nobody has looked at: rows are packed, as most are


def plan(
    config: Config,
    override: Overrides = None,
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            metavar="NxNAME",
            help="GPUs of each node, such as 2xH200; default: cluster.gpus_per_node and gpu, else this machine's.",
        ),
    ] = "",
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Number of machines; default: cluster.nodes.")
    ] = None,
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
    planned = plan_of(asked, gpus=gpus, nodes=nodes, link=link, catalogue=catalogue, exact=exact)
    if as_json:
        _print_json(planned, compare=compare)
    else:
        _print_page(planned, compare=compare)
    if not planned.fits:
        raise typer.Exit(_DOES_NOT_FIT)


def plan_of(
    asked: ResolvedConfig,
    *,
    gpus: str,
    nodes: int | None,
    link: str = "",
    catalogue: Path | None = None,
    exact: bool = False,
) -> Plan:
    """The plan of a config on named hardware: `gpus`, else what `cluster` names, else this machine."""
    from shardtune.launch.named_paths import check_inputs
    from shardtune.model.describe import model_files, outline_of_files
    from shardtune.observe.gpus import describe_gpus
    from shardtune.plan.gather import gather_facts
    from shardtune.plan.report import assemble
    from shardtune.plan.target import target_of

    config = asked.config
    check_inputs(config)
    if not gpus and config.cluster.gpu and config.cluster.gpus_per_node:
        gpus = f"{config.cluster.gpus_per_node}x{config.cluster.gpu}"
    here = () if gpus or config.parallel.device == "cpu" else describe_gpus().get("gpus", ())
    target = target_of(
        config.parallel, here, gpus=gpus, nodes=nodes or config.cluster.nodes, link=link, catalogue=catalogue
    )
    folder, stored = model_files(config.model)
    data = _data(config, folder, exact=exact)

    def fill_share() -> float:
        return data.fill(config.data.max_length, packed=False) if data is not None else _UNKNOWN_FILL

    facts = gather_facts(config, outline_of_files(config.model, folder, stored), target.machine, fill_share)
    planned = assemble(asked.on_device(target.machine.device), facts, target.cluster, data)
    return _traced(planned, folder, stored) if exact and planned.memory.known_by == "estimated" else planned


def _traced(planned: Plan, folder: Path, stored: Mapping[str, StoredTensor]) -> Plan:
    """With activations of this very model, traced on the meta device."""
    from dataclasses import replace

    from shardtune.model.meta_model import build_meta_model
    from shardtune.train.memory.trace_model import trace_model

    meta_model = build_meta_model(planned.config.model, folder, stored)
    try:
        return replace(planned, traced=trace_model(meta_model, planned.config, planned.facts, planned.work))
    except ValueError as error:  # attention that is not softmax over flash, e.g. Gemma 2's soft cap
        typer.echo(f"notice    the layers cannot be traced, so activations stay an estimate: {error}", err=True)
        return planned


def _data(config: RunConfig, folder: Path, *, exact: bool) -> DataSize | None:
    from shardtune.data.estimate import counted, data_size

    if exact:
        return counted(_prepared(config), config.data)
    named = config.model.tokenizer_name_or_path
    return data_size(config, Path(named).expanduser() if named else folder)


def _prepared(config: RunConfig) -> Path:
    """The folder of the prepared data, made now if it is not there."""
    from rich.console import Console

    from shardtune.data.prepare import prepare
    from shardtune.model.load import load_tokenizer  # brings torch
    from shardtune.observe.preparing import PreparingProgress

    name = config.model.tokenizer_name_or_path or config.model.model_name_or_path
    with PreparingProgress(Console(stderr=True)) as progress:
        return prepare(config.data, config.train.seed, load_tokenizer(config.model), name, progress=progress).folder


def _print_json(planned: Plan, *, compare: bool) -> None:
    import json

    from shardtune.plan.compare import alternative_json, alternatives, nearest_that_fits
    from shardtune.plan.report import as_json

    found = as_json(planned)
    nearest = None if planned.fits else nearest_that_fits(planned)
    found["nearest"] = alternative_json(nearest) if nearest is not None else None
    if compare:
        found["alternatives"] = [alternative_json(one) for one in alternatives(planned)]
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False))


def _print_page(planned: Plan, *, compare: bool) -> None:
    from rich.console import Console

    from shardtune.plan.compare import alternatives, nearest_that_fits
    from shardtune.plan.page import show, show_alternatives

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no × shows a question mark
    console = Console()
    show(console, planned, None if planned.fits else nearest_that_fits(planned))
    if compare:
        show_alternatives(console, planned, alternatives(planned))
