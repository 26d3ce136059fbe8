"""`shardtune export RUN|ADAPTER --to …`: writes a trained model as merged weights, GGUF or an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.options import BaseModel, Checkpoint, RunsDir, Trained, writes_nothing_when_interrupted
from shardtune.export.request import Dtype, TargetName


def export(
    run: Trained,
    to: Annotated[
        TargetName,
        typer.Option("--to", help="merged: one checkpoint; adapter: a PEFT folder; gguf; vllm, sglang: an adapter."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="New folder; default: RUN/export/TARGET.")
    ] = None,
    checkpoint: Checkpoint = None,
    model: BaseModel = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Dtype of the merged weights; default: that of the base, or bf16 if it is FP8."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", metavar="TYPE", help="Quantization of a GGUF file, e.g. q8_0; default: none."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size", metavar="SIZE", help="Largest safetensors file of merged weights.", show_default="5GB"
        ),
    ] = None,
    min_surviving_delta: Annotated[
        float | None,
        typer.Option(
            "--min-surviving-delta",
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Refuse if less of a parameter's change survives rounding; default: 0.9 for fp8 and quantized GGUF.",
        ),
    ] = None,
    base_name: Annotated[
        str | None,
        typer.Option(
            "--base-name",
            metavar="OWNER/NAME",
            help="The base model's name on the Hub, for the model card, if the run loaded it from a local folder.",
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")] = False,
) -> None:
    """Export a trained model as merged weights, GGUF or an adapter, verified before the folder appears.

    Exit codes: 0 written and verified; 1 writing or verification failed; 2 this export is not possible.
    """
    from shardtune.export.log import ConsoleLog
    from shardtune.export.request import ExportRequest, default_out, parse_size
    from shardtune.export.run import export_model
    from shardtune.inference.source import find_tuned

    tuned = find_tuned(run, runs_dir, checkpoint=checkpoint, base=model)
    request = ExportRequest(
        tuned,
        to,
        out if out is not None else default_out(tuned, to),
        dtype,
        parse_size(max_shard_size) if max_shard_size is not None else None,
        min_surviving_delta,
        quantization,
        base_name,
    )
    with writes_nothing_when_interrupted():
        done = export_model(request, ConsoleLog(to_stderr=as_json))
    if as_json:
        print(json.dumps(done.as_json(), indent=1))
