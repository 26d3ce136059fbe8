"""How fast are TRL and PEFT alone? One process, one measurement: `stock.py SETTINGS.json`.

The same model, rows and adapters as our case, through `SFTTrainer` with nothing of ours in it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windows import WindowLog


@dataclass(frozen=True)
class Settings:
    """What a measurement is asked to be; written as JSON by `speed.py`."""

    model: str  # a folder with config.json and a tokenizer
    rows: str  # a file of JSON lines, `text` holding the numbers of the tokens
    out: str  # where the windows' lines go
    end: int  # the token behind every row
    length: int
    batch: int
    accumulation: int
    steps: int
    window: int
    targets: list[str]
    parameters: list[str] = field(default_factory=list)  # PEFT's target_parameters
    checkpointing: bool = False
    packing: bool = False
    liger: bool = False
    rank: int = 16


def token_rows(settings: Settings) -> list[list[int]]:
    with Path(settings.rows).open() as lines:
        return [[*map(int, json.loads(line)["text"].split()), settings.end] for line in lines]


def random_model(folder: str) -> Any:
    """The model of a config.json with weights drawn on the device, in the dtype the config names."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    # Read from the file: an older transformers, as Unsloth may bring, does not know the name.
    torch.set_default_dtype(getattr(torch, json.loads((Path(folder) / "config.json").read_text())["dtype"]))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = getattr(transformers, config.architectures[0])(config)
    torch.set_default_dtype(torch.float32)
    return model


def trainer_of(settings: Settings) -> Any:
    """TRL's trainer, which counts the tokens it trains on (no padding) and logs the clock."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    log = WindowLog(Path(settings.out), settings.window)
    on_gpu = torch.cuda.is_available()

    class Counting(SFTTrainer):
        seen: Any = 0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            # Added up on the device: reading it here would make the host wait in every step.
            self.seen += inputs["input_ids"].numel() if mask is None else mask.sum()
            return super().training_step(model, inputs, *args, **kwargs)

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            log.step_ended(state.global_step, trainer.seen, trainable=trainable)

    lora = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank, lora_dropout=0.0, target_modules=settings.targets,
        target_parameters=settings.parameters or None, bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(random_model(settings.model), lora)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    args = SFTConfig(
        output_dir=str(Path(settings.out).parent / "stock"), max_steps=settings.steps, learning_rate=1e-4,
        per_device_train_batch_size=settings.batch, gradient_accumulation_steps=settings.accumulation,
        gradient_checkpointing=settings.checkpointing, max_length=settings.length, packing=settings.packing,
        use_liger_kernel=settings.liger, bf16=on_gpu, use_cpu=not on_gpu, dataloader_pin_memory=on_gpu,
        # Packing is done by TRL itself; rows that are not packed need nothing done to them.
        dataset_kwargs=None if settings.packing else {"skip_prepare_dataset": True},
        remove_unused_columns=settings.packing, logging_steps=1000, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": token_rows(settings)})
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    trainer = Counting(model=model, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=[Clock()])
    return trainer


if __name__ == "__main__":
    trainer_of(Settings(**json.loads(Path(sys.argv[1]).read_text()))).train()
