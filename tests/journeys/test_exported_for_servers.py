"""A trained model goes to the program that will serve it: one command each, checked with the server's own rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journey import Journey


@pytest.mark.slow
def test_a_run_leaves_as_gguf_and_for_vllm_and_sglang(journey: Journey, chat_model: Path, toy_data: Path) -> None:
    import gguf

    journey.write_config(
        model={"model_name_or_path": str(chat_model), "torch_dtype": "float32"},
        lora={"r": 4, "target_modules": ["q_proj", "o_proj", "up_proj"], "rank_pattern": {"o_proj": 2}},
        data={"dataset_name_or_path": str(toy_data), "prompt_template": "{question} => {answer}", "max_length": 64},
        train={"max_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "save_strategy": "no"},
        parallel={"device": "cpu"},
    )  # fmt: skip
    journey.shardtune("train", "run.yaml")
    run = journey.only_run()

    done = json.loads(journey.shardtune("export", run, "--to", "gguf", "--json").stdout)
    assert done["verified"] == "logits" and done["verification"]["logits_error"] < 1e-2
    (file,) = (run / "export" / "gguf").glob("*.gguf")
    assert file.name.startswith(run.name) and "README.md" in done["files"]
    stated = gguf.GGUFReader(file).fields
    assert "<|im_start|>" in stated["tokenizer.chat_template"].contents()

    said = journey.shardtune("export", run, "--to", "vllm").stdout
    assert "vllm serve" in said and "--max-lora-rank 8" in said and "match the adapter's" in " ".join(said.split())
    config = json.loads((run / "export" / "vllm" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4 and not config["rank_pattern"]
    card = (run / "export" / "vllm" / "README.md").read_text()
    assert "vllm serve" in card and str(run) not in card

    said = journey.shardtune("export", run, "--to", "sglang", "--out", "served").stdout
    assert "--lora-strict-loading" in said
    again = journey.shardtune("export", run, "--to", "sglang", "--out", "served", expect=2).stderr
    assert "exists already" in again
    refused = journey.shardtune(
        "export", run, "--to", "gguf", "--quantization", "q4_k_m", "--out", "x", expect=2
    ).stderr
    assert "llama-quantize" in " ".join(refused.split()) and not (journey.folder / "x").exists()
    refused = journey.shardtune("export", run, "--to", "vllm", "--dtype", "bf16", "--out", "x", expect=2).stderr
    assert "--dtype has no effect with --to vllm" in " ".join(refused.split())
