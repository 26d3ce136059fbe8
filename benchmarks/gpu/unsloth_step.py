"""How fast is a step of Unsloth? One process, one measurement: `unsloth_step.py SETTINGS.json`; a bare loop.

Unsloth reads weights from a disk only, so random ones are written there first, by a process that does not import it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from stock import Settings, random_model
from windows import WindowLog


def write_weights(settings: Settings) -> Path:
    """A folder with weights beside the given one."""
    folder = Path(settings.model).with_name(Path(settings.model).name + "-weights")
    if not folder.exists():
        subprocess.run([sys.executable, __file__, "--draw", settings.model, str(folder)], check=True)
    return folder


def draw(model: str, folder: str) -> None:
    from transformers import AutoTokenizer

    random_model(model).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "3"  # Unsloth looks for one; any token will do
    tokenizer.save_pretrained(folder)


def adapted_model(folder: Path, settings: Settings) -> Any:
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=settings.length, load_in_4bit=False, dtype=torch.bfloat16, local_files_only=True
    )
    return FastLanguageModel.get_peft_model(
        model, r=settings.rank, lora_alpha=2 * settings.rank, lora_dropout=0, bias="none",
        target_modules=settings.targets, use_gradient_checkpointing="unsloth" if settings.checkpointing else False,
    )  # fmt: skip


def measure(settings: Settings) -> None:
    folder = write_weights(settings)
    model = adapted_model(folder, settings)  # before anything else imports transformers: it must patch it first
    import torch

    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    log = WindowLog(Path(settings.out), settings.window)
    tokens = 0
    trainable, device = sum(p.numel() for p in trained), next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(1, settings.steps + 1):
        ids = torch.randint(10, model.config.vocab_size - 1, (settings.batch, settings.length), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += ids.numel()
        log.step_ended(step, tokens, trainable=trainable)


if __name__ == "__main__":
    if sys.argv[1] == "--draw":
        draw(*sys.argv[2:])
    else:
        measure(Settings(**json.loads(Path(sys.argv[1]).read_text())))
