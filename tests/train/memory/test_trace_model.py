from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardtune.config import load_config
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers
from shardtune.plan.gather import gather_facts
from shardtune.plan.report import assemble
from shardtune.plan.target import target_of
from shardtune.train.memory.trace_model import trace_model


def test_a_model_traced_now_needs_what_the_table_says(tmp_path: Path, toy_model: Path, toy_data: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{model_name_or_path: {toy_model}}}\n"
        f"data: {{dataset_name_or_path: {toy_data}, max_length: 1024}}\n"
        "lora: {lora_dropout: 0}\n"
        "train: {per_device_train_batch_size: 64, gradient_checkpointing: none}\n",
        encoding="utf-8",
    )
    asked = load_config(file)
    meta_model = build_meta_model(asked.config.model, toy_model, read_headers(toy_model))
    target = target_of(asked.config.parallel, (), gpus="1xH200")
    facts = gather_facts(asked.config, meta_model.outline, target.machine, lambda: 0.5)
    plan = assemble(asked, facts, target.cluster, None)
    traced = replace(plan, traced=trace_model(meta_model, plan.config, facts, plan.work))
    assert (plan.memory.known_by, traced.memory.known_by) == ("table", "traced")
    assert traced.memory.activations == pytest.approx(plan.memory.activations, rel=0.01)
    assert traced.memory.total == pytest.approx(plan.memory.total, rel=0.01)
