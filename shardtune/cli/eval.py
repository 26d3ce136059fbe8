"""`shardtune eval RUN`: how good base and tuned model are on given data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.options import BaseModel, Checkpoint, Device, RunsDir, Trained, writes_nothing_when_interrupted


def evaluate(
    run: Trained,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE|FOLDER|NAME",
            help="Data to evaluate on, processed like the run's own data.",
            show_default="the run's validation rows",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="NAME",
            help="Split of --data, or of the run's data.",
            show_default="test, validation or train, the first there is",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="NAMES", help="perplexity, exact_match, json.", show_default="all that apply"
        ),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option("--max-rows", metavar="N", min=1, help="Evaluate a seeded sample of N rows.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Longest answer, in tokens.",
            show_default="1.5 times the longest expected answer, between 16 and 1024",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="N", min=1, help="Prompts per batch.", show_default="32, or 8 on a CPU"),
    ] = None,
    checkpoint: Checkpoint = None,
    model: BaseModel = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="NAMES", help="lm-evaluation-harness tasks, such as arc_easy,hellaswag."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N documents of each task.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", metavar="DIR", help="A folder with your own tasks.")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot", metavar="N", min=0, help="Number of few-shot examples for each question of a task."
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Format the tasks' questions with the chat template.")
    ] = False,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            "-o",
            metavar="KEY=VALUE",
            help="Override a data setting of the run, e.g. data.max_length=2048. Repeatable.",
        ),
    ] = None,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Also evaluate the base model, and compare.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Also write the result to FILE, and its rows next to it."),
    ] = None,
    device: Device = None,
    runs_dir: RunsDir = None,
) -> None:
    """Score base and tuned model on the same rows: perplexity, exact match, JSON fields, lm-evaluation-harness tasks.

    Every number has a 95 % confidence interval; the difference tuned − base is paired by row. The result is stored in
    RUN/evaluations and shown by `shardtune report`. docs/evaluate.md says how each number is computed.

    Exit codes: 0 evaluated; 2 invalid input; 1 anything else.
    """
    from rich.console import Console

    from shardtune.errors import UserInputError
    from shardtune.evaluation.result import Destination
    from shardtune.evaluation.rows import DataChoice
    from shardtune.evaluation.tasks import TaskChoice, check_tasks
    from shardtune.inference.source import find_tuned
    from shardtune.terminal import say

    if data == "":
        raise UserInputError("--data is empty.", fix="Give a file, folder or Hub name, or leave it out.")
    asked = TaskChoice.parse(tasks, limit, include_path, num_fewshot, apply_chat_template)
    of_rows = (data, split, metrics, max_rows, max_new_tokens, override)
    with_rows = asked is None or any(value is not None for value in of_rows)
    tuned = find_tuned(run, runs_dir, checkpoint=checkpoint, base=model)
    if asked is not None:
        check_tasks(asked)
    destination = Destination.check(tuned.run, out)
    choice = DataChoice(data, split, max_rows, tuple(override or ())) if with_rows else None

    from shardtune.evaluation.evaluate import Request, evaluate
    from shardtune.evaluation.table import print_evaluation
    from shardtune.inference.answers import named_device

    console = Console(stderr=as_json)
    if tuned.notice:
        say(console, "notice", tuned.notice, "yellow")
    request = Request(choice, asked, metrics, max_new_tokens, batch_size, base)
    with writes_nothing_when_interrupted():
        found = evaluate(tuned, request, console, named_device(device))
    written = destination.write(found)  # first: a terminal that is gone must not lose it
    print_evaluation(console, found)
    for file in written:
        say(console, "result", str(file))
    if destination.notice:
        say(console, "notice", destination.notice, "yellow")
    elif tuned.run is not None:
        say(console, "report", f"shardtune report {tuned.run}")
    if as_json:
        import json

        print(json.dumps(next(iter(written.values()), found.as_dict()), ensure_ascii=False))
