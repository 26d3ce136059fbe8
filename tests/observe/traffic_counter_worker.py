"""Run on ranks by test_traffic_counter.py: steps of a sharded toy; writes the bytes that each rank counted, and sizes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from toys import toy_text_config
from transformers import AutoModelForCausalLM, TrainerState

from shardtune.config.schema import ParallelSection
from shardtune.observe.profiler import LLMStepProfiler
from shardtune.observe.traffic import _COLLECTIVES, TrafficCounter, nodes_of_ranks
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import Processes, join
from shardtune.parallel.shard import GradientSync, decoder_layers, reshard_all, shard_model
from shardtune.plan.traffic import ModelBytes
from shardtune.train.shards import clip_gradients


class Case(NamedTuple):
    """Args:
    shards: Ranks per replica of the base; None = all.
    """

    world: int = 2
    shards: int | None = None
    shard_adapters: bool = False
    compute: torch.dtype | None = torch.bfloat16
    reduce_dtype: str = "float32"
    reshard: bool = True
    micro_batches: int = 2
    compiled: bool = False


CASES = {
    "full": Case(),
    "full in float32": Case(compute=None, micro_batches=1),
    "full, kept": Case(reshard=False, reduce_dtype="bfloat16"),
    "full, compiled": Case(compiled=True),
    "hybrid": Case(world=4, shards=2),
    "replicate, adapters sharded": Case(shards=1, shard_adapters=True, compute=None),
    "replicate": Case(shards=1, compute=None),
}


def toy() -> PeftModel:
    """Every size is a multiple of eight: no rows are padded on two or four ranks."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    return get_peft_model(
        base, LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    ).train()


def sizes(model: PeftModel, case: Case) -> ModelBytes:
    """Of a model that is not sharded yet."""
    element = 4 if case.compute is None else 2
    found = {"layers": 0, "root": 0, "trained": 0}
    for name, parameter in model.named_parameters():
        found["trained" if parameter.requires_grad else "layers" if ".layers." in name else "root"] += parameter.numel()
    return ModelBytes(
        layers=found["layers"] * element,
        root=found["root"] * element,
        trained=found["trained"],
        gathered=element,
        reduced=4 if case.reduce_dtype == "float32" else 2,
    )


def passes(model: PeftModel, sync: GradientSync, micro_batches: int) -> None:
    ids = torch.randint(3, 70, (2, 16))
    for number in range(micro_batches):
        sync.before_micro_batch(last=number == micro_batches - 1)
        model(input_ids=ids, labels=ids).loss.backward()


def count(processes: Processes, case: Case) -> dict[str, Any]:
    model = toy()
    expected = sizes(model, case)
    if case.compiled:
        for layer in decoder_layers(model, None):
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
    section = ParallelSection(device="cpu", reduce_dtype=case.reduce_dtype, reshard_after_forward=case.reshard)
    mesh = build_mesh(processes, case.shards, shard_adapters=case.shard_adapters)
    shard_model(model, section, mesh, case.compute)
    sync = GradientSync(model, section, mesh, case.micro_batches)
    counter = TrafficCounter(model, nodes_of_ranks(processes.device), lambda: True)
    passes(model, sync, case.micro_batches)
    sent = counter.take()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    clip_gradients(trained, 1.0)
    dist.all_reduce(torch.tensor(1))  # as tokens are counted
    processes.agree(True)
    rest = counter.take()["collectives"]
    counter.close()
    passes(model, sync, case.micro_batches)
    after = counter.take()["collectives"]
    return {"sizes": asdict(expected), "sent": sent, "rest": rest, "after": after, "norms": len(trained)}


def profiled(processes: Processes) -> dict[str, Any]:
    """Two steps under the profiler alone, each followed by an evaluation that is reported after its first batch."""
    case = CASES["full"]
    model, mesh = toy(), build_mesh(processes)
    expected = sizes(model, case)
    section = ParallelSection(device="cpu", reshard_after_forward=True)
    shard_model(model, section, mesh, case.compute)
    sync = GradientSync(model, section, mesh, case.micro_batches)
    written: list[dict[str, Any]] = []
    log = SimpleNamespace(write=lambda event, **fields: written.append({"event": event, **fields}))
    profiler = LLMStepProfiler(console=Console(quiet=True), events=log)  # type: ignore[arg-type]
    args: Any = SimpleNamespace(
        process_index=processes.rank, world_size=processes.world_size, device=processes.device, report_to=[],
        average_tokens_across_devices=True, gradient_accumulation_steps=case.micro_batches, gradient_checkpointing=False,
    )  # fmt: skip
    control: Any = None
    profiler.on_train_begin(args, TrainerState(), control, model=model)
    for step in (1, 2):
        profiler.on_step_begin(args, TrainerState(), control)
        passes(model, sync, case.micro_batches)
        profiler.on_step_end(args, TrainerState(global_step=step), control)
        with torch.no_grad():
            model.eval()(input_ids=torch.ones(1, 4, dtype=torch.int64))
        profiler.on_prediction_step(args, TrainerState(), control)
        reshard_all(model)
        model.train()
    profiler.close()
    return {"sizes": asdict(expected), "profiles": [event for event in written if event["event"] == "profile"]}


def main(out: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GROUP_RANK"] = str(rank * 2 // world)  # two nodes
    names = [collective.name for collective in _COLLECTIVES if hasattr(dist, collective.name)]
    before = [getattr(dist, name) for name in names]
    with join(ParallelSection(device="cpu")) as processes:
        seen: dict[str, Any] = {n: count(processes, case) for n, case in CASES.items() if case.world == world}
        if world == 2:
            seen["profiled"] = profiled(processes)
    seen["restored"] = [getattr(dist, name) for name in names] == before
    (Path(out) / f"rank{rank}of{world}.json").write_text(json.dumps(seen))
