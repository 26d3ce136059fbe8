"""Models that are unlike Llama: a hybrid one trains as it should, and one that cannot is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from journey import Journey, read_events
from reference import load, score, text_example
from toys import save_toy, toy_text_config


def write_rows(journey: Journey) -> list[str]:
    rows = [" ".join(f"w{(7 * i + j) % 60:02d}" for j in range(3 + i)) for i in range(21)]
    for name, part in (("train", rows[5:]), ("validation", rows[:5])):
        path = journey.folder / "data" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in part), encoding="utf-8")
    return rows[:5]


def config_for(journey: Journey, model: Path, **train: object) -> None:
    journey.write_config(
        model={"model_name_or_path": str(model), "torch_dtype": "float32"},
        lora={"r": 4, "target_modules": "all-linear"},
        data={"dataset_name_or_path": "data", "val_split": "validation", "max_length": 64},
        train={"max_steps": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 4, **train},
    )


@pytest.mark.slow
def test_a_model_with_convolutions_trains_unpacked_and_scores_what_the_run_said(journey: Journey) -> None:
    model = save_toy(
        transformers.Lfm2ForCausalLM, toy_text_config("lfm2", initializer_range=0.2), journey.folder / "model"
    )
    validation = write_rows(journey)
    config_for(journey, model)
    said = journey.shardtune("train", "run.yaml").stdout
    assert "off (convolutions read preceding tokens" in " ".join(said.split())
    run = journey.only_run()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    plain = score(load(model, run / "final"), [text_example(tokenizer, row) for row in validation])
    assert read_events(run, "eval")[-1]["loss"] == pytest.approx(plain.loss, abs=5e-5)


@pytest.mark.slow
def test_packing_it_all_the_same_is_refused_with_the_reason(journey: Journey) -> None:
    model = save_toy(transformers.Lfm2ForCausalLM, toy_text_config("lfm2"), journey.folder / "model")
    write_rows(journey)
    config_for(journey, model, packing=True)
    refused = journey.shardtune("train", "run.yaml", expect=2)
    told = " ".join((refused.stdout + refused.stderr).split())
    assert "train.packing is true" in told and "Convolutions read preceding tokens" in told


def test_gpt2_is_refused_before_anything_is_started(journey: Journey) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=72)
    model = save_toy(transformers.GPT2LMHeadModel, config, journey.folder / "model")
    write_rows(journey)
    config_for(journey, model)
    refused = journey.shardtune("train", "run.yaml", expect=2)
    told = " ".join((refused.stdout + refused.stderr).split())
    assert "instead of linear layers" in told and "fan_in_fan_out=True" in told
    assert not journey.runs()
