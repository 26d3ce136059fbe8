"""The folder of a run that has ended, without its training: config, events and an adapter of random values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

FORMATS: dict[str, dict[str, Any]] = {
    "chat": {"name": "chat", "why": "column 'messages' contains messages in OpenAI format", "columns": ["messages"]},
    "text": {"name": "text", "why": "column 'text'", "columns": ["text"]},
    "prompt-completion": {
        "name": "prompt-completion", "why": "columns 'prompt' and 'completion'", "columns": ["prompt", "completion"],
    },
    "prompt": {"name": "prompt", "why": "data.prompt_template", "columns": ["sentence", "json"]},
}  # fmt: skip


def toy_run(folder: Path, base: Path, form: str | None = "chat", *, scale: float = 0.5, **data: Any) -> Path:
    """A run with `final/`; `form`: what its `data` event says, None: there are no events. `data`: settings."""
    folder.mkdir(parents=True)
    config = {
        "model": {"model_name_or_path": str(base), "torch_dtype": "float32"},
        "data": {"dataset_name_or_path": str(base), **data},
        "train": {"max_steps": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"format": 1, "settings": {}, "started": 1.0, "finished": True}))
    if form is not None:
        event = {"v": 2, "time": 1.0, "rank": 0, "event": "data", "format": FORMATS[form], "folder": "x", "train": {}}
        (folder / "events-rank0.jsonl").write_text(json.dumps(event) + "\n")
    write_toy_adapter(folder / "final", base, scale=scale)
    return folder


def write_toy_adapter(folder: Path, base: Path, *, scale: float = 0.5) -> Path:
    """LoRA with random values, as PEFT itself writes it."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"]),
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(folder)
    return folder
