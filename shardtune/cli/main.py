"""Which commands are there? Each is in its own file and imports what it needs when it is called."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardtune import __version__
from shardtune.cli import (
    best,
    cancel,
    chat,
    checkpoints,
    cluster,
    config,
    dashboard,
    data,
    describe,
    doctor,
    env,
    eval_loss,
    explain,
    export,
    generate,
    init,
    jobs,
    logs,
    plan,
    pull,
    quickstart,
    report,
    run,
    submit,
    train,
)
from shardtune.cli import eval as eval_
from shardtune.cli.options import ConfigCommand, JobCommand, SingleValues, WithSettings
from shardtune.errors import ShardtuneError
from shardtune.run.failure import render
from shardtune.terminal import fitted

app = typer.Typer(
    name="shardtune",
    help="Fine-tune large language models with LoRA on sharded GPUs (PyTorch FSDP2), from one YAML.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init.init)
app.command("train", cls=WithSettings)(train.train)
app.command("run", cls=run.ScriptCommandLine)(run.run)
app.command("eval")(eval_.evaluate)
app.command("eval-loss", cls=WithSettings)(eval_loss.eval_loss)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("plan", cls=ConfigCommand)(plan.plan)
app.command("explain")(explain.explain)
app.command("checkpoints")(checkpoints.checkpoints)
app.command("best")(best.best)
app.command("env")(env.env)
app.command("doctor", cls=ConfigCommand)(doctor.doctor)
app.command("report")(report.report)
app.command("dashboard")(dashboard.dashboard)
app.command("quickstart")(quickstart.quickstart)
app.command("export")(export.export)
app.command("submit", cls=JobCommand)(submit.submit)
app.command("jobs")(jobs.jobs)
app.command("status")(jobs.status)
app.command("logs")(logs.logs)
app.command("describe")(describe.describe)
app.command("cancel")(cancel.cancel)
app.command("suspend")(cancel.suspend)
app.command("resume")(cancel.resume)
app.command("pull")(pull.pull)
app.add_typer(config.app, name="config")
app.add_typer(cluster.app, name="cluster")
app.add_typer(data.app, name="data")
for group in (app, config.app, cluster.app, data.app):
    for command in group.registered_commands:
        if command.cls is None or not issubclass(command.cls, SingleValues):
            command.cls = SingleValues


def _version(asked: bool) -> None:
    if asked:
        print(f"shardtune {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a ShardtuneError is printed without a traceback."""
    try:
        app()
    except ShardtuneError as error:
        print(fitted(render(error), sys.stderr), file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as ended:  # Typer's, for which a Ctrl-C is nothing but an exit code
        interrupt = getattr(ended.__context__, "__cause__", None)
        if isinstance(interrupt, KeyboardInterrupt):
            print("; ".join(["Interrupted", *map(str, interrupt.args)]) + ".", file=sys.stderr)
        raise
