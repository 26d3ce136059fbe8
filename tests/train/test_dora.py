"""DoRA: sharded as alone, from the model as it is, and what plain PEFT computes with the adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import free_ports, on_ranks
from running import events
from safetensors.torch import load_file
from toys import toy_config

WORKER = Path(__file__).parent / "resume_worker.py"


@pytest.fixture(scope="module")
def runs(
    toy_model: Path, toy_data: Path, shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    config = toy_config(
        tmp_path_factory.mktemp("dora"), toy_model, toy_data, data={"val_split": "validation"},
        lora={"use_dora": True, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
        train={"max_steps": 4, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
    )  # fmt: skip
    for nproc, wanted in ((1, [{"run_id": "alone"}]), (2, [{"run_id": "two", "crash_at": 2}, {"run_id": "two"}])):
        asked = [{**one, "overrides": [f"train.per_device_train_batch_size={4 // nproc}"]} for one in wanted]
        on_ranks(
            shared_environment,
            WORKER,
            nproc,
            config,
            json.dumps(free_ports(len(asked))),
            json.dumps(asked),
            timeout=300,
        )
    return config.parent / "runs"


@pytest.mark.slow
def test_two_processes_train_magnitudes_as_one_does_through_a_crash(runs: Path) -> None:
    assert [event["step"] for event in events(runs / "two", "resume")] == [2]
    alone, shared = ([event["loss"] for event in events(runs / name, "step")] for name in ("alone", "two"))
    assert shared == pytest.approx(alone, rel=2e-5)
    one, two = (load_file(runs / name / "final" / "adapter_model.safetensors") for name in ("alone", "two"))
    magnitudes = [name for name in one if name.endswith("lora_magnitude_vector")]
    assert len(magnitudes) == 14
    assert all((one[name] - two[name]).abs().max() < 1e-5 for name in one)


@pytest.mark.slow
def test_the_run_begins_as_the_model_is_and_plain_peft_reaches_its_last_loss(
    runs: Path, toy_model: Path, toy_data: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(toy_model)
    base = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, runs / "two" / "final").eval()
    norms = torch.linalg.norm(base.model.layers[0].mlp.up_proj.base_layer.weight, dim=1)
    trained = load_file(runs / "two" / "final" / "adapter_model.safetensors")
    moved = trained["base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"] - norms
    assert 1e-4 < moved.abs().max() < 0.1  # a few steps away from where it began
    summed, tokens = 0.0, 0
    for row in map(json.loads, (toy_data / "validation.jsonl").read_text().splitlines()):
        prompt = tokenizer(row["question"] + " =>")["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        summed += torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        tokens += len(answer)
    assert summed / tokens == pytest.approx(events(runs / "two", "eval")[-1]["loss"], rel=1e-5)
