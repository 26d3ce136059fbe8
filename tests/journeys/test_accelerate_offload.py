"""The `fsdp.yaml` that circulates, with `fsdp_offload_params: true`, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journey import Journey, read_events
from reference import load, pair_example, score

FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
"""


@pytest.mark.slow
def test_offloading_has_no_effect_on_a_cpu_and_the_run_trains(
    journey: Journey, toy_model: Path, toy_data: Path
) -> None:
    from transformers import AutoTokenizer

    (journey.folder / "fsdp.yaml").write_text(FSDP)
    journey.write_config(
        model={"model_name_or_path": str(toy_model), "torch_dtype": "float32"},
        lora={"r": 4, "target_modules": "all-linear"},
        data={"dataset_name_or_path": str(toy_data), "prompt_template": "{question} => {answer}",
              "val_split": "validation", "max_length": 64},
        train={"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 4},
        parallel={"accelerate_config": "fsdp.yaml", "device": "auto"},
    )  # fmt: skip
    said = journey.shardtune("train", "run.yaml", env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert "parallel.offload_params has no effect" in " ".join(said.split())
    run = journey.only_run()
    (verdicts,) = [event["text"] for event in read_events(run, "notice") if event["about"] == "accelerate"]
    assert "fsdp_offload_params: true (no effect The device is a CPU" in verdicts
    assert read_events(run, "run_start")[0]["world_size"] == 2
    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    rows = map(json.loads, (toy_data / "validation.jsonl").read_text().splitlines())
    examples = [pair_example(tokenizer, row["question"] + " => ", row["answer"]) for row in rows]
    plain = score(load(toy_model, run / "final"), examples)
    assert read_events(run, "eval")[-1]["loss"] == pytest.approx(plain.loss, abs=2e-5)
