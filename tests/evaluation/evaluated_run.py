"""A run that nobody trained, with an adapter that PEFT itself made."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from toys import toy_config


def fake_run(folder: Path, model: Path, data: Path, *, changes: float = 0.5, **of_data: object) -> Path:
    """A finished run: its config, its record, and random adapters in final/."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = toy_config(folder, model, data, data={"val_split": "validation", **of_data})
    run = folder / "runs" / "toy"
    (run / "final").mkdir(parents=True)
    (run / "config.yaml").write_text(config.read_text())
    settings = yaml.safe_load(config.read_text())
    (run / "run.json").write_text(json.dumps({"started": 1.0, "settings": settings}))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * changes)
    peft.save_pretrained(run / "final")
    return run
