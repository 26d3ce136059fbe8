"""Plans without files: a model of `model_facts` on GPUs that need not be here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_facts import dense_7b

from shardtune.config import ResolvedConfig
from shardtune.config.resolve import Origin
from shardtune.config.schema import RunConfig
from shardtune.data.estimate import DataSize
from shardtune.plan.facts import Facts
from shardtune.plan.report import Plan, assemble
from shardtune.plan.target import target_of

ROWS = DataSize(rows=20_000, tokens=6_000_000, sequences=1_500, validation=0, exact=False, how="estimated from 9 rows")


def asked(**sections: dict[str, Any]) -> ResolvedConfig:
    """A config of 2 x 4,096 tokens and 4 micro-batches, changed by `sections`."""
    train = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": "none"}
    values: dict[str, dict[str, Any]] = {
        "model": {"model_name_or_path": "m"},
        "data": {"dataset_name_or_path": "d.jsonl", "max_length": 4096},
        "train": train,
    }
    for section, given in sections.items():
        values[section] = {**values.get(section, {}), **given}
    config = RunConfig.model_validate(values)
    origins = {f"{name}.{key}": Origin("default") for name, part in config for key in type(part).model_fields}
    return ResolvedConfig(config, origins)


def planned(
    gpus: str = "2xH200", nodes: int = 1, *, facts: Facts | None = None, rows: DataSize | None = ROWS, **sections: Any
) -> Plan:
    config = asked(**sections)
    target = target_of(config.config.parallel, (), gpus=gpus, nodes=nodes)
    fill = rows.fill(4096, packed=False) if rows is not None else 0.5
    known = replace(facts or dense_7b(), machine=target.machine, fill_share=lambda: fill)
    return assemble(config, known, target.cluster, rows)
