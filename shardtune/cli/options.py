"""Options that several commands share, and a help text that lists all settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from shardtune.config.cluster_schema import Target

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]


def complete_setting(incomplete: str) -> list[str]:
    """For shell completion: `section.key=` of every matching setting."""
    from shardtune.config.suggestions import section_fields

    names = (f"{section}.{key}=" for section, fields in section_fields().items() for key in fields.model_fields)
    return [name for name in names if name.startswith(incomplete)]


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """For shell completion: the ids of the runs in --runs-dir, or in the default folders."""
    from shardtune.report.runs import run_names, runs_dirs

    given = ctx.params.get("runs_dir")
    folders = [Path(given)] if given else runs_dirs()
    return [name for folder in folders for name in run_names(folder) if name.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-o",
        metavar="KEY=VALUE",
        help="Set one value, e.g. train.seed=1. Repeatable.",
        autocompletion=complete_setting,
    ),
]
RunsDir = Annotated[
    Path | None,
    typer.Option(
        "--runs-dir",
        metavar="DIR",
        help="Where to look up run ids (train.output_dir); default: runs, then other folders here that contain runs.",
    ),
]
AccelerateConfig = Annotated[
    Path | None,
    typer.Option("--accelerate-config", metavar="FILE", help="Use the settings of an accelerate FSDP config file."),
]
# Where it runs.
Nproc = Annotated[
    str, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine; auto: one per GPU, or one.")
]
NodeProcesses = Annotated[
    str, typer.Option("--nproc", metavar="N|auto", help="Processes of each node (parallel.nproc); auto: one per GPU.")
]
Nnodes = Annotated[
    int | None, typer.Option("--nnodes", metavar="N", min=1, help="Number of machines; run the same command on each.")
]
NodeRank = Annotated[int | None, typer.Option("--node-rank", metavar="R", help="Rank of this machine, from 0.")]
MasterAddr = Annotated[str | None, typer.Option("--master-addr", metavar="HOST", help="Address of machine 0.")]
MasterPort = Annotated[
    int | None,
    typer.Option("--master-port", metavar="PORT", min=0, max=65535, help="Port of machine 0; default 29500."),
]
InsecureNetwork = Annotated[
    bool,
    typer.Option(
        "--insecure-network",
        help="Allow several machines without SHARDTUNE_SECRET, on a network where everyone is trusted.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Start more processes than this machine has memory or cores for.")]
SkipPreflight = Annotated[
    bool,
    typer.Option(
        "--skip-preflight", help="Start several processes without checking first whether this machine is fit for them."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
# Asking a trained model.
Trained = Annotated[
    str,
    typer.Argument(
        metavar="RUN|ADAPTER",
        help="A run's id (or a unique prefix) or folder, a checkpoint, or the folder of a PEFT adapter.",
        show_default=False,
        autocompletion=complete_run,
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="WHICH",
        help="Checkpoint of a run: final, best, latest or a step number.",
        show_default="final",
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help="Current location of the base model, if it has moved since training."),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer, in tokens.", show_default="512"),
]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", help="0: greedy decoding; above 0: sampling.")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Sample from the most likely tokens whose total probability is P."),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed for sampling, for reproducible answers.")]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option("--device", help="Device to compute on.", show_default="the first GPU, or the CPU"),
]
# Jobs on a cluster.
To = Annotated[Target | None, typer.Option("--to", help="Where the job goes; default: cluster.target.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more details before the first step.")]

# Which cluster, and which job on it.
Context = Annotated[
    str | None,
    typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; default: the current one."),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace; default: the context's.")
]
Script = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- SCRIPT ARGS…",
        help="A script in the image or on a volume, or -m MODULE, instead of training. CONFIG is then optional.",
        show_default=False,
    ),
]
JobName = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.", show_default=False)]


def _config_option() -> Any:
    """`--config FILE` as typer itself creates it: the name of its option class differs between versions."""
    scratch = typer.Typer(add_completion=False)

    @scratch.command()
    def named(
        config_option: Annotated[
            Path | None, typer.Option("--config", metavar="FILE", help="The same as CONFIG.", show_default=False)
        ] = None,
    ) -> None: ...

    return next(param for param in typer.main.get_command(scratch).params if param.name == "config_option")


@contextmanager
def writes_nothing_when_interrupted() -> Iterator[None]:
    """For what Ctrl-C ends before anything of it is there: the last line of the command says so."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("nothing was written") from interrupt


def _listed(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _what_to_give(error: typer.BadParameter) -> str:
    """What an option takes instead, where typer only has its validator's words; otherwise nothing."""
    if "is not one of" in error.message:
        return _listed(re.findall(r"'([^']*)'", error.message.rpartition(" is not one of ")[2]))
    found: Any = error.__cause__  # pydantic's, where this version of typer uses it
    first: dict[str, Any] = found.errors()[0] if hasattr(found, "errors") else {}
    bounds = first.get("ctx") or {}
    if "ge" in bounds or "le" in bounds:
        return f"{bounds['ge']:.15g} or more" if "ge" in bounds else f"{bounds['le']:.15g} or less"
    number = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
    return number.get(first.get("type", ""), "")


class SingleValues(TyperCommand):
    """A command that refuses a second value for an option that has one, instead of silently keeping the last, and says
    what an option takes that was given something else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values: dict[str, Any] = {}
        if not ctx.resilient_parsing:
            parsed: Any = self.make_parser(ctx).parse_args(list(args))
            values, _, given = parsed
            for param in given:
                takes_one = param.param_type_name == "option" and not (param.multiple or param.is_flag or param.count)
                if takes_one and given.count(param) > 1:
                    ctx.fail(f"{max(param.opts, key=len)} is given more than once, but takes one value.")
        try:
            return list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            wanted = _what_to_give(error)
            wrong: Any = error.param
            if wrong is None or not wanted:
                raise
            name = max(wrong.opts, key=len) if wrong.param_type_name == "option" else wrong.make_metavar(ctx)
            value = values.get(wrong.name)
            what = f"{name} {value}" if isinstance(value, str) else name
            ctx.fail(f"{what}: give {wanted}.")
            raise  # for type checkers: `fail` does not return


class ConfigCommand(SingleValues):
    """A command whose argument CONFIG may also be given as `--config FILE`, as with other trainers."""

    others = "--config FILE"  # what may stand instead of CONFIG

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        positional = next(param for param in self.params if param.name == "config")
        self._needs_config = positional.required
        positional.required = False  # `parse_args` asks for one of the two
        self.params.append(_config_option())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        named = ctx.params.pop("config_option", None)
        given = [value for value in (ctx.params.get("config"), named) if value is not None]
        if len(given) == 2:
            ctx.fail(f"CONFIG is given twice: '{given[0]}' and --config '{given[1]}'. Remove one of them.")
        if not given and self._needs_config and not ctx.resilient_parsing:
            ctx.fail(f"Missing argument 'CONFIG' (or {self.others}).")
        ctx.params["config"] = given[0] if given else None
        return rest


class JobCommand(ConfigCommand):
    """A command about the job of CONFIG, or of a script behind `--` (its argument `script`), which needs no CONFIG."""

    others = "--config FILE, or -- SCRIPT"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        split = args.index("--") if "--" in args else len(args)
        words = args[split + 1 :]
        if split < len(args) and not ctx.resilient_parsing:
            from shardtune.script.command import ScriptCommand

            ScriptCommand.parse(words)  # raises: typer makes no difference between no words and no `--`
        self._needs_config = split == len(args)
        rest = super().parse_args(ctx, args[:split])
        if (extra := ctx.params["script"]) and not ctx.resilient_parsing:
            ctx.fail(f"Got unexpected extra argument ({' '.join(extra)}). A script stands behind --.")
        ctx.params["script"] = words or None
        return rest


class WithSettings(ConfigCommand):
    """A command whose `--help` ends with all settings of a config and their descriptions."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from rich.console import Console

        from shardtune.config.reference import settings_table

        Console().print(settings_table())
