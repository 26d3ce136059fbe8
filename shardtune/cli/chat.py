"""`shardtune chat RUN`: a conversation with a trained model, in the terminal or in a browser."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from shardtune.cli.options import (
    BaseModel,
    Checkpoint,
    Device,
    MaxNewTokens,
    RunsDir,
    Seed,
    System,
    Temperature,
    TopP,
    Trained,
)


def chat(
    ctx: typer.Context,
    run: Trained,
    system: System = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Seed = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="The base model answers, too, with its own history.")
    ] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a page with base and tuned model side by side.")] = False,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="With --web: address to listen on; anything but loopback needs a token.",
            show_default="127.0.0.1",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="With --web; 0 picks a free port.",
            show_default="8766, or a free one",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="SHARDTUNE_CHAT_TOKEN",
            metavar="TEXT",
            help="With --web: access token; generated and printed if needed and not given.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    model: BaseModel = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue each text as it is, without the training template.")
    ] = False,
    device: Device = None,
    runs_dir: RunsDir = None,
) -> None:
    """Chat with a trained model: base and adapter, without merging, in this process.

    Prompts are formatted as in training. Models trained on conversations see the history, others only the question.
    Ctrl-C stops an answer, Ctrl-D or /quit ends the chat.

    Exit codes: 0 ended; 1 the model failed; 2 invalid option or model.
    """
    from shardtune.errors import UserInputError
    from shardtune.inference.sampling import Sampling
    from shardtune.inference.source import find_tuned
    from shardtune.inference.trained_format import trained_format

    sampling = Sampling.checked(temperature, top_p, seed)
    if not web:
        for name in ("host", "port", "token"):  # a token may also stand in the environment, for when it is needed
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise UserInputError(f"--{name} has no effect without --web.", fix="Leave it out, or add --web.")
    tuned = find_tuned(run, runs_dir, checkpoint=checkpoint, base=model)
    trained = trained_format(tuned, raw=raw)
    from shardtune.inference.answers import AnswerOptions
    from shardtune.inference.chat import chat as run_chat

    options = AnswerOptions(sampling, system, max_new_tokens, compare, device)
    if web:
        from shardtune.inference.web import ListenAddress, serve_chat

        raise typer.Exit(serve_chat(tuned, trained, options, ListenAddress(host, port, token)))
    try:
        code = run_chat(tuned, trained, options)
    except BrokenPipeError:  # `shardtune chat … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise typer.Exit(code)
