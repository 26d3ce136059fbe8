"""Run on ranks by test_prefetch.py: toys sharded with different prefetch; writes what happened in which order."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from sharded_events import Recorder
from toys import toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.config.schema import ParallelSection
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import Processes, join
from shardtune.parallel.shard import layers_of, reshard_all, shard_model

LAYERS, STEPS = 5, 3
CASES = [  # layers ahead in forward and backward, whether layers are let go in between, what is computed again
    *product([(0, 0), (1, 1), (2, 2)], (True, False), ("none",)),
    *product([(2, 0), (0, 2)], (True,), ("none",)),
    *product([(1, 1)], (True, False), ("selective", "full")),
    ((2, 2), True, "full"),
    ((0, 0), True, "full"),
]


def case_name(ahead: tuple[int, int], reshard: bool, way: str) -> str:
    return f"{ahead[0]} {ahead[1]} {'reshard' if reshard else 'keep'} {way}"


def run_case(processes: Processes, ahead: tuple[int, int], reshard: bool, way: str) -> dict[str, Any]:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(toy_text_config("llama", num_hidden_layers=LAYERS))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(base, lora).train()
    section = ParallelSection(
        device="cpu", forward_prefetch=ahead[0], backward_prefetch=ahead[1], reshard_after_forward=reshard
    )
    shard_model(model, section, build_mesh(processes), None, selective=way == "selective")
    if way == "full":
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    recorder = Recorder(model, layers_of(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = torch.randint(3, 70, (2, 16), generator=torch.Generator().manual_seed(processes.rank))
    steps, losses = [], []
    for step in range(STEPS):
        recorder.clear()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        steps.append([(e.kind, e.unit, e.pass_) for e in recorder.events if e.kind != "wait"])
        losses.append(loss.item())
        if step + 1 < STEPS:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # an evaluation in between is a pass without a way back
                model.eval()(input_ids=ids)
            reshard_all(model)
            model.train()
    gradients = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.requires_grad}
    return {"steps": steps, "losses": losses, "gradients": gradients}


def main(out: str) -> None:
    with join(ParallelSection(device="cpu")) as processes:
        orders, numbers = {}, {}
        for case in CASES:
            seen = run_case(processes, *case)
            orders[case_name(*case)] = seen["steps"]
            numbers[case_name(*case)] = {"losses": seen["losses"], "gradients": seen["gradients"]}
        (Path(out) / f"order{processes.rank}.json").write_text(json.dumps(orders))
        torch.save(numbers, Path(out) / f"numbers{processes.rank}.pt")
