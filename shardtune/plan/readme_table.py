"""Which models fit on which GPUs? The tables of the README and of docs/, and the example of docs/plan.md.

From shapes of public models:

python -m shardtune.plan.readme_table README.md docs/plan.md docs/what-fits.md docs/mistral-small-4.md
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from shardtune.config import ResolvedConfig
from shardtune.config.resolve import Origin
from shardtune.config.schema import RunConfig
from shardtune.data.estimate import DataSize
from shardtune.plan.compare import alternatives
from shardtune.plan.gather import gather_facts
from shardtune.plan.page import show, show_alternatives
from shardtune.plan.public_models import CONFIGS, outline_of_public
from shardtune.plan.report import Plan, assemble
from shardtune.plan.target import target_of

_GPUS: Mapping[str, str] = {"24 GB": "RTX-4090", "48 GB": "L40S", "80 GB": "H100", "141 GB": "H200"}
_COUNTS, _SHARERS = (1, 2, 8), (1, 2, 4, 8)
_LENGTH, _ROWS = 4096, 100_000
_ADAPTERS: Mapping[str, Mapping[str, object]] = {
    "attention, shared expert": {"lora_dropout": 0.0},
    "the routed experts too (rank 4)": {"experts": True, "expert_r": 4, "lora_dropout": 0.0},
}


def table() -> str:
    """A row for each model and number of GPUs."""
    heads = [f"{name} ({gpu})" for name, gpu in _GPUS.items()]
    lines = [f"| model | GPUs | {' | '.join(heads)} |", f"|---|---:|{'---|' * len(heads)}"]
    for model in CONFIGS:
        for count in _COUNTS:
            cells = " | ".join(cell(plan_of(model, f"{count}x{gpu}")) for gpu in _GPUS.values())
            lines.append(f"| {model if count == _COUNTS[0] else ''} | {count} | {cells} |")
    return "\n".join(lines)


def short_table() -> str:
    """A row for each model, on one GPU."""
    heads = " | ".join(f"1 × {gpu} ({memory})" for memory, gpu in _GPUS.items())
    lines = [f"| model | {heads} |", f"|---|{'---|' * len(_GPUS)}"]
    for model in CONFIGS:
        cells = " | ".join(cell(plan_of(model, f"1x{gpu}")) for gpu in _GPUS.values())
        lines.append(f"| {model} | {cells} |")
    return "\n".join(lines)


def vram_table() -> str:
    """What a GPU needs at the peak with every setting that saves memory but offloading, by the number of GPUs."""
    heads = [f"{count} GPU{'s' if count > 1 else ''}" for count in _SHARERS]
    lines = [f"| model | weights | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(heads)}"]
    for model in CONFIGS:
        precision = "fp8" if model == "Mistral Small 4" else "bf16"
        plans = [_smallest(model, count, precision) for count in _SHARERS]
        weights = f"{plans[0].memory.weights / 2**30:.3g} in {'FP8' if precision == 'fp8' else precision}"
        peaks = " | ".join(f"{plan.memory.total / 2**30:.3g}" for plan in plans)
        lines.append(f"| {model} | {weights} | {peaks} |")
    return "\n".join(lines)


def _smallest(model: str, count: int, precision: str) -> Plan:
    """One row per micro-batch, full recomputation, the base sharded over all GPUs."""
    return plan_of(
        model,
        f"{count}xH200",
        rows=count,
        model={"base_precision": precision},
        train={"per_device_train_batch_size": 1, "gradient_checkpointing": "full", "offload_activations": False},
        parallel={"shard": "full", "reshard_after_forward": True, "offload_params": False},
    )


def mistral_table() -> str:
    """configs/mistral-small-4.yaml on one, two and three H200, in one machine or each in its own."""
    heads = (
        "H200",
        "adapters on",
        "each GPU holds",
        "micro-batch, recomputation",
        "GiB",
        "tokens/s",
        "with `fp8_compute`",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---|---:|---:|---:|"]
    for gpus, nodes in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3)):
        for words, lora in _ADAPTERS.items():
            plan, fast = (
                plan_of("Mistral Small 4", f"{gpus}xH200", nodes, rows=24, lora=lora, train=train)
                for train in ({}, {"fp8_compute": True})
            )
            where = f"{nodes} machines with {gpus} each" if nodes > 1 else f"{gpus} in one machine" if gpus > 1 else "1"
            lines.append(
                f"| {where} | {words} | {_held(plan)} | {plan.work.tokens:,} tokens, {plan.work.checkpointing} | "
                f"{plan.memory.total / 2**30:.0f} | {plan.time.tokens_per_second:,.0f} | "
                f"{fast.time.tokens_per_second:,.0f} |"
            )
    return "\n".join(lines)


def _held(plan: Plan) -> str:
    """`1/2 of the base in FP8`."""
    share = "all" if plan.work.shards == 1 else f"1/{plan.work.shards}"
    return f"{share} of the base in {'FP8' if plan.work.fp8 else 'bf16'}"


def plan_of(name: str, gpus: str, nodes: int = 1, rows: int = 16, **settings: Mapping[str, object]) -> Plan:
    """Everything `auto` but `settings`: rows of 4,096 tokens that are full, rank 16 on attention and MLP."""
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": name, **settings.get("model", {})},
            "data": {"dataset_name_or_path": "full-rows.jsonl", "max_length": _LENGTH},
            "lora": settings.get("lora", {}),
            "train": {
                "effective_batch_size": rows,
                "per_device_train_batch_size": "auto",
                "gradient_accumulation_steps": "auto",
                **settings.get("train", {}),
            },
            "parallel": settings.get("parallel", {}),
        }
    )
    origins = {f"{section}.{key}": Origin("default") for section, values in config for key in type(values).model_fields}
    target = target_of(config.parallel, (), gpus=gpus, nodes=nodes)
    facts = gather_facts(config, outline_of_public(name), target.machine, lambda: 1.0)
    data = DataSize(_ROWS, _ROWS * _LENGTH, _ROWS, 0, exact=True, how="full rows")
    return assemble(ResolvedConfig(config, origins), facts, target.cluster, data)


def cell(plan: Plan) -> str:
    """`16,384: **16.5k** r`: tokens of a micro-batch, tokens per second, what it took to fit; or `–`."""
    if not plan.fits:
        return "–"
    work, rate = plan.work, plan.time.tokens_per_second
    taken = {
        "f": work.fp8,
        "s": work.checkpointing == "selective",
        "r": work.checkpointing == "full",
        "a": work.offload_activations,
        "w": work.offload_params,
    }
    speed = f"{rate / 1000:.3g}k" if rate >= 1000 else f"{rate:.3g}"
    return f"{work.tokens:,}: **{speed}** {' '.join(letter for letter, used in taken.items() if used)}".rstrip()


def example() -> str:
    """What `shardtune plan` prints."""
    console = Console(file=io.StringIO(), width=100, color_system=None, force_terminal=True)
    plan = plan_of("Llama-3.3-70B", "8xH100", nodes=2, rows=64)
    show(console, plan)
    show_alternatives(console, plan, alternatives(plan))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    command = "$ shardtune plan run.yaml --gpus 8xH100 --nodes 2 --compare"
    return "\n".join(["```console", command, *(line.rstrip() for line in lines), "```"])


BLOCKS: Mapping[str, Callable[[], str]] = {
    "memory table": table,
    "short memory table": short_table,
    "vram table": vram_table,
    "mistral table": mistral_table,
    "example": example,
}


def renewed(page: str) -> str:
    """A page with what its markers enclose made again."""
    for name, make in BLOCKS.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if begin in page:
            before, rest = page.split(begin)
            page = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
