"""`shardtune generate RUN`: asks a trained model, or its base beside it."""

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


def generate(
    run: Trained,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; repeatable. '-': all of stdin."),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help="One prompt per line, or a .jsonl file with rows as in training. '-': the lines of stdin.",
        ),
    ] = None,
    system: System = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Seed = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also show the base model's answer, side by side.")
    ] = False,
    checkpoint: Checkpoint = None,
    model: BaseModel = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the training template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt on stdout.")] = False,
    device: Device = None,
    runs_dir: RunsDir = None,
) -> None:
    """Answer prompts with a trained model: base and adapter, without merging, in this process.

    Prompts are formatted as in training, with the run's data.prompt_template or chat template. Only answers are printed
    on stdout.

    Exit codes: 0 answered; 1 the model failed; 2 invalid option, prompt or model; 130 Ctrl-C.
    """
    from shardtune.inference.prompt_files import read_prompts
    from shardtune.inference.sampling import Sampling
    from shardtune.inference.source import find_tuned
    from shardtune.inference.trained_format import trained_format

    sampling = Sampling.checked(temperature, top_p, seed)
    prompts = read_prompts(prompt or (), prompt_file)
    tuned = find_tuned(run, runs_dir, checkpoint=checkpoint, base=model)
    trained = trained_format(tuned, raw=raw)
    from shardtune.inference.answers import AnswerOptions
    from shardtune.inference.generate import generate as answer

    options = AnswerOptions(sampling, system, max_new_tokens, compare, device)
    try:
        code = answer(tuned, trained, prompts, options, as_json=as_json)
    except BrokenPipeError:  # `shardtune generate … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise typer.Exit(code)
