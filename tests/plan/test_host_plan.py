"""Host memory and disk against what is really written and pinned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from model_facts import GIB, dense_7b, facts_of, llama

from shardtune.adapters.lora import add_lora
from shardtune.checkpoint.adapter import gather_adapter, inference_config
from shardtune.checkpoint.rng import pack_rng
from shardtune.checkpoint.snapshot import Snapshot
from shardtune.config import load_config
from shardtune.config.schema import LoraSection, RunConfig
from shardtune.plan.host import checkpoint_bytes, host_memory
from shardtune.plan.work import Work

STEP = Work(batch=4, length=4096, compiled=True, checkpointing="full")


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text("model: {model_name_or_path: m}\ndata: {dataset_name_or_path: d}\n")
    return load_config(file, overrides, environ={}).config


def test_a_checkpoint_is_as_large_as_said(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 128}
    built = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, **sizes))
    model, _, _ = add_lora(built, LoraSection(r=16, lora_dropout=0.0))
    adapter = gather_adapter(model)
    state = {f"{key}/{n}": torch.zeros_like(t) for n, t in adapter.items() for key in ("exp_avg", "exp_avg_sq")}
    steps = {f"step/{n}": torch.zeros(()) for n in adapter}
    snapshot = Snapshot(adapter, state | steps, {"settings": {}}, [pack_rng(torch.device("cpu"))])
    snapshot.write(tmp_path / "step-1", inference_config(model))
    written = sum(path.stat().st_size for path in (tmp_path / "step-1").iterdir())
    facts = llama(256, 512, 6, 4, 2, 128, head=64)
    assert sum(t.numel() for t in adapter.values()) == facts.trained
    assert 0.97 * written < checkpoint_bytes(facts, STEP) < 1.03 * written


def test_disk_holds_the_kept_checkpoints_one_in_the_making_and_the_adapter(tmp_path: Path) -> None:
    found = host_memory(dense_7b(), STEP, config(tmp_path, "train.save_total_limit=2"))
    assert found.disk == 3 * found.checkpoint + 4 * dense_7b().trained
    assert host_memory(dense_7b(), STEP, config(tmp_path, "train.save_strategy=no")).disk == 4 * dense_7b().trained


def test_offloaded_inputs_and_parameters_are_pinned_in_powers_of_two(tmp_path: Path) -> None:
    plain, inputs, parameters = (
        host_memory(dense_7b(), work, config(tmp_path))
        for work in (STEP, replace(STEP, offload_activations=True), replace(STEP, offload_params=True))
    )
    assert plain.pinned == plain.offloaded == 0
    assert inputs.pinned == inputs.offloaded == 32 * 4 * 4096 * 4096 * 2  # powers of two already
    rounding = 32 * 3 * (128 - 112) << 20  # gate, up and down of each layer are 112 MiB; nothing else is as large
    assert 0 <= parameters.pinned + 8 * dense_7b().trained - parameters.offloaded - rounding < GIB
    assert parameters.per_rank > parameters.pinned > 2 * dense_7b().parameters


def test_ranks_of_a_node_add_up(tmp_path: Path) -> None:
    settings = config(tmp_path, "train.dataloader_num_workers=4")
    one, eight = (host_memory(dense_7b(nodes=(n,)), STEP, settings) for n in (1, 8))
    assert eight.per_node - eight.checkpoint == 8 * (one.per_node - one.checkpoint) == 8 * one.per_rank
    assert one.shm == 4 * 2 * STEP.tokens * 48 and eight.shm > 8 * one.shm


def test_on_a_cpu_the_model_is_in_host_memory(tmp_path: Path) -> None:
    facts = facts_of(dense_7b().model | {}, dense_7b().kinds[0], device="cpu")
    assert host_memory(facts, replace(STEP, compiled=False), config(tmp_path)).per_rank > 2 * facts.parameters
