"""Run on ranks by test_shard.py: shard a toy, train two steps, write what this rank saw."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shardtune.adapters.lora import add_lora
from shardtune.checkpoint.adapter import gather_adapter, load_adapter, write_adapter
from shardtune.config.schema import LoraSection, ModelSection, ParallelSection
from shardtune.model.load import load_model
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import Processes, join
from shardtune.parallel.shard import local_bytes, shard_model

SECTION = ParallelSection(device="cpu", forward_prefetch=2, backward_prefetch=0)


def main(model_folder: str, out: str) -> None:
    with join(SECTION) as processes:
        for name, compute_dtype in (("float32", None), ("bf16", torch.bfloat16)):
            (Path(out) / name).mkdir(exist_ok=True)
            train(processes, model_folder, Path(out) / name, compute_dtype)


def train(processes: Processes, model_folder: str, out: Path, compute_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, _, _ = add_lora(
        load_model(ModelSection(model_name_or_path=model_folder, torch_dtype="float32")),
        LoraSection(lora_dropout=0),
    )
    sharding = shard_model(model, SECTION, build_mesh(processes), compute_dtype)
    parameters = dict(model.named_parameters())
    seen = {
        "all_dtensors": all(isinstance(p, DTensor) for p in parameters.values()),
        "local_bytes": local_bytes(model),
        "total_bytes": sharding.total_bytes,
        "units": sharding.units,
    }
    optimizer = torch.optim.AdamW((p for p in parameters.values() if p.requires_grad), lr=0.05)
    ids = torch.arange(5, 45).view(2, 20)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    seen["gathered_dtype"] = str(logits.dtype)
    tensors = gather_adapter(model)
    # What was gathered, put back over a spoilt model, gives the same logits: no slice is lost on the way.
    with torch.no_grad():
        for p in parameters.values():
            if p.requires_grad:
                p.zero_()
    load_adapter(model, tensors)
    with torch.no_grad():
        seen["restored"] = (model(input_ids=ids).logits - logits).abs().max().item()
    seen["agree"] = [processes.agree(processes.rank == 1), processes.agree(False)]
    seen["shared"] = processes.share_from_main(f"from {processes.rank}")
    if processes.is_main:
        write_adapter(model, tensors, out / "adapter")
        torch.save(logits.float(), out / "logits.pt")
    (out / f"rank{processes.rank}.json").write_text(json.dumps(seen))
