"""Run on ranks by test_traffic_counter.py: steps of a sharded toy; writes the bytes that each rank counted, and the sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from toys import toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.config.schema import ParallelSection
from shardtune.observe.traffic import _COLLECTIVES, TrafficCounter, nodes_of_ranks
from shardtune.parallel.processes import Processes, join
from shardtune.parallel.shard import GradientSync, decoder_layers, shard_model
from shardtune.train.shards import clip_gradients

FULL = {  # compute dtype, dtype of reductions, reshard_after_forward, micro-batches
    "float32": (None, "float32", True, 1),
    "bf16": (torch.bfloat16, "float32", True, 2),
    "bf16 kept": (torch.bfloat16, "bfloat16", False, 2),
}


def toy() -> PeftModel:
    """Every size is a multiple of eight: no rows are padded on two or four ranks."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    return get_peft_model(
        base, LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    ).train()


def sizes(model: PeftModel) -> dict[str, int]:
    """Parameters, before they are sharded: frozen ones of the layers and of the rest, and those that train."""
    found = {"layers": 0, "root": 0, "trained": 0}
    for name, parameter in model.named_parameters():
        found["trained" if parameter.requires_grad else "layers" if ".layers." in name else "root"] += parameter.numel()
    return found


def passes(model: PeftModel, sync: GradientSync | None = None, micro_batches: int = 1) -> None:
    ids = torch.randint(3, 70, (2, 16))
    for number in range(micro_batches):
        if sync is not None:
            sync.before_micro_batch(last=number == micro_batches - 1)
        model(input_ids=ids, labels=ids).loss.backward()


def full(processes: Processes, case: str, *, compiled: bool = False) -> dict[str, Any]:
    compute, reduce_dtype, reshard, micro_batches = FULL[case]
    model = toy()
    counted = sizes(model)
    if compiled:
        for layer in decoder_layers(model, None):
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
    section = ParallelSection(device="cpu", reduce_dtype=reduce_dtype, reshard_after_forward=reshard)
    shard_model(model, section, processes.mesh, compute)
    sync = GradientSync(model, section, processes.mesh, micro_batches)
    counter = TrafficCounter(model, nodes_of_ranks(processes.device), lambda: True)
    passes(model, sync, micro_batches)
    weights = counter.take()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    clip_gradients(trained, 1.0)
    dist.all_reduce(torch.tensor(1))  # as tokens are counted
    processes.agree(True)
    rest = counter.take()["collectives"]
    counter.close()
    passes(model)
    after = counter.take()["collectives"]
    return {"sizes": counted, "sent": weights, "rest": rest, "after": after, "norms": len(trained)}


def hybrid(processes: Processes) -> dict[str, Any]:
    """Two replicas of two shards, as FSDP2 shards over a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, precision = toy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    counted = sizes(model)
    for layer in decoder_layers(model, None):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    counter = TrafficCounter(model, nodes_of_ranks(processes.device), lambda: True)
    passes(model)
    sent = counter.take()
    counter.close()
    return {"sizes": counted, "sent": sent}


def main(out: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GROUP_RANK"] = str(rank * 2 // world)  # two nodes
    names = [collective.name for collective in _COLLECTIVES if hasattr(dist, collective.name)]
    before = [getattr(dist, name) for name in names]
    with join(ParallelSection(device="cpu")) as processes:
        if world == 2:
            seen = {case: full(processes, case) for case in FULL}
            seen["compiled"] = full(processes, "bf16", compiled=True)
        else:
            seen = {"hybrid": hybrid(processes)}
    seen["restored"] = [getattr(dist, name) for name in names] == before  # type: ignore[assignment]
    (Path(out) / f"rank{rank}of{world}.json").write_text(json.dumps(seen))
