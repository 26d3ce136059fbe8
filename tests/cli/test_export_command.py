"""`shardtune export` as people use it: a run that the command line trained, loaded again without shardtune."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from running import Command
from small_disk import make_read_only, small_disk
from toys import toy_chat_llama

_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} says {{ m['content'] }}<|im_end|>{% endfor %}"
# Plain transformers and PEFT, in a process that cannot import shardtune.
_LOAD = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, merged = sys.argv[1:]
assert "shardtune" not in sys.modules
tokenizer = AutoTokenizer.from_pretrained(merged)
chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "World"}]
text = tokenizer.apply_chat_template(chat, tokenize=False)
ids = tokenizer(text, return_tensors="pt").input_ids
one = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
with torch.no_grad():
    alone = one(input_ids=ids).logits
    tuned = PeftModel.from_pretrained(one, adapter).eval()(input_ids=ids).logits
    made = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(input_ids=ids).logits
change = tuned - alone
print(json.dumps({"text": text, "change": change.norm().item(), "error": (made - tuned).norm().item(),
                  "tokenizer": AutoTokenizer.from_pretrained(adapter).apply_chat_template(chat, tokenize=False)}))
"""


def test_mistakes_are_named_before_anything_is_loaded(shardtune: Command, tmp_path: Path) -> None:
    missing = shardtune("export", tmp_path / "no-run", "--to", "merged")
    assert missing.returncode == 2 and "There is no run" in missing.stderr
    unknown = shardtune("export", tmp_path, "--to", "onnx")
    assert unknown.returncode == 2 and "gguf" in unknown.stderr


@pytest.mark.slow
def test_a_run_is_exported_and_loads_without_shardtune(
    shardtune: Command, environment: dict[str, str], tmp_path: Path
) -> None:
    model = toy_chat_llama(tmp_path / "base")
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    (tmp_path / "own.jinja").write_text(_TEMPLATE)
    (tmp_path / "data").mkdir()
    for name, count in (("train", 40), ("validation", 8)):
        rows = [json.dumps({"messages": [*turns[:1], {**turns[1], "content": f"{name} {i}"}]}) for i in range(count)]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    config = {
        "model": {"model_name_or_path": str(model), "torch_dtype": "float32"},
        "data": {
            "dataset_name_or_path": str(tmp_path / "data"), "val_split": "validation", "chat_template": str(tmp_path / "own.jinja"),
            "max_length": 256, "train_on": "all",
        },
        "lora": {"r": 4, "target_modules": "all-linear"},
        "train": {"max_steps": 6, "learning_rate": 0.02, "save_steps": 3, "output_dir": str(tmp_path / "runs")},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    trained = shardtune("train", tmp_path / "run.yaml", "--run-id", "mine")
    assert trained.returncode == 0, trained.stderr
    run = tmp_path / "runs" / "mine"
    assert json.loads((run / "run.json").read_text())["base"]["folder"] == str(model)

    merged = shardtune("export", "mine", "--runs-dir", tmp_path / "runs", "--to", "merged", "--json")
    assert merged.returncode == 0, merged.stderr
    result = json.loads(merged.stdout)
    assert result["path"] == str(run / "export" / "merged") and result["verified"] == "logits"
    assert "the run's validation data" in result["verification"]["samples"]
    assert sorted(result["files"]) == sorted(
        str(file.relative_to(result["path"])) for file in Path(result["path"]).rglob("*") if file.is_file()
    )
    alone = shardtune("export", run, "--to", "adapter", "--out", tmp_path / "adapter")
    assert alone.returncode == 0, alone.stderr
    again = shardtune("export", run, "--to", "merged")
    assert again.returncode == 2 and "not empty" in again.stderr
    step = shardtune("export", run, "--to", "merged", "--checkpoint", "3", "--dtype", "bf16")
    assert step.returncode == 0, step.stderr
    assert (run / "export" / "merged-step-000003" / "chat_template.jinja").is_file()

    plain = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    loaded = subprocess.run(
        [sys.executable, "-c", _LOAD, str(model), str(tmp_path / "adapter"), result["path"]],
        env=plain, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr
    found = json.loads(loaded.stdout.splitlines()[-1])
    assert found["change"] > 0.1 and found["error"] < 1e-3 * found["change"]
    assert "user says Hello" in found["text"] and found["tokenizer"] == found["text"]  # that of training

    with small_disk(tmp_path / "disk", 4000) as disk:
        subprocess.run(["cp", "-r", str(run / "final"), str(run / "run.json"), str(run / "config.yaml"), disk])
        make_read_only(disk)
        if os.access(disk, os.W_OK):
            pytest.skip("a read-only disk is not to be had here")
        refused = shardtune("export", disk, "--to", "merged")
        assert refused.returncode == 2 and "read-only" in refused.stderr
        elsewhere = shardtune("export", disk, "--to", "merged", "--out", tmp_path / "elsewhere")
        assert elsewhere.returncode == 0, elsewhere.stderr


@pytest.mark.slow
def test_a_real_model_is_merged(shardtune: Command, smollm2: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear"))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * 0.02
    adapted.save_pretrained(tmp_path / "adapter")
    done = shardtune("export", tmp_path / "adapter", "--to", "merged", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        tuned = adapted.eval()(input_ids=ids).logits
        with adapted.disable_adapter():
            alone = adapted(input_ids=ids).logits
        made = merged(input_ids=ids).logits
    assert (made - tuned).norm() < 1e-3 * (tuned - alone).norm()
