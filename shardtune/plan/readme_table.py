"""Which models fit on which GPUs? The table in the README, from the plan and the shapes of public models.

python -m shardtune.plan.readme_table README.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from shardtune.config import ResolvedConfig
from shardtune.config.resolve import Origin
from shardtune.config.schema import RunConfig
from shardtune.data.estimate import DataSize
from shardtune.plan.gather import gather_facts
from shardtune.plan.public_models import CONFIGS, outline_of_public
from shardtune.plan.report import Plan, assemble
from shardtune.plan.target import target_of

BEGIN, END = "<!-- begin: memory table -->", "<!-- end: memory table -->"
_GPUS: Mapping[str, str] = {"24 GB": "RTX-4090", "48 GB": "L40S", "80 GB": "H100", "141 GB": "H200"}
_COUNTS = (1, 2, 8)
_LENGTH, _ROWS = 4096, 100_000


def table() -> str:
    """A row for each model and number of GPUs."""
    heads = [f"{name} ({gpu})" for name, gpu in _GPUS.items()]
    lines = [f"| model | GPUs | {' | '.join(heads)} |", f"|---|---:|{'---|' * len(heads)}"]
    for model in CONFIGS:
        for count in _COUNTS:
            cells = " | ".join(cell(plan_of(model, f"{count}x{gpu}")) for gpu in _GPUS.values())
            lines.append(f"| {model if count == _COUNTS[0] else ''} | {count} | {cells} |")
    return "\n".join(lines)


def plan_of(model: str, gpus: str) -> Plan:
    """Everything `auto`: rows of 4,096 tokens that are full, rank 16 on attention and MLP."""
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": model},
            "data": {"dataset_name_or_path": "full-rows.jsonl", "max_length": _LENGTH},
            "train": {
                "effective_batch_size": 16,
                "per_device_train_batch_size": "auto",
                "gradient_accumulation_steps": "auto",
            },
        }
    )
    origins = {f"{section}.{key}": Origin("default") for section, values in config for key in type(values).model_fields}
    target = target_of(config.parallel, (), gpus=gpus)
    facts = gather_facts(config, outline_of_public(model), target.machine, lambda: 1.0)
    data = DataSize(_ROWS, _ROWS * _LENGTH, _ROWS, 0, exact=True, how="full rows")
    return assemble(ResolvedConfig(config, origins), facts, target.cluster, data)


def cell(plan: Plan) -> str:
    """`16,384 tokens, 16.5k tok/s`; what helped to fit it; or that it does not."""
    if not plan.fits:
        return "–"
    helped = [
        name
        for name, used in (
            ("FP8", plan.work.fp8),
            ("recomputed", plan.work.checkpointing == "full"),
            ("offloaded", plan.work.offload_params or plan.work.offload_activations),
        )
        if used
    ]
    rate = plan.time.tokens_per_second
    speed = f"{rate / 1000:.3g}k" if rate >= 1000 else f"{rate:.3g}"
    return f"{plan.work.tokens:,}: **{speed}**" + (f" ({', '.join(helped)})" if helped else "")


def write_into(page: Path) -> None:
    """Replace what is between the markers."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    write_into(Path(sys.argv[1]))
