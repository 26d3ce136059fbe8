"""How is one of our cases measured? A config on the disk, `shardtune train`, and what the run wrote down."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from cases import Case, Pace, shape_of, write_model, write_rows
from windows import memory, read_lines, summed_up

RUN = "bench"


def config_of(case: Case, folder: Path, pace: Pace | None = None, *, tiny: bool = False) -> Path:
    """Everything a run of the case needs, in `folder`; returns its config file."""
    pace, shape = pace or Pace(), shape_of(case.model, tiny=tiny)
    model = write_model(folder / case.model, shape)
    data = write_rows(folder / "rows.jsonl", case, pace.steps, int(str(shape["vocab_size"])))
    config: dict[str, Any] = {
        "model": {"model_name_or_path": str(model), "weights": "random"},
        "data": {"dataset_name_or_path": str(data), "max_length": case.length, "cache_dir": str(folder / "prepared")},
        "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0},
        "train": {
            "output_dir": str(folder / "runs"), "max_steps": pace.steps, "per_device_train_batch_size": case.batch,
            "gradient_accumulation_steps": case.accumulation, "gradient_checkpointing": False,
            "optim": "adamw_torch_fused", "save_strategy": "no", "logging_steps": pace.window, "resume": "never",
        },
        "parallel": {"nproc": 1},
    }  # fmt: skip
    for section, values in case.sets.items():
        config[section] |= values
    if tiny:
        config["model"]["torch_dtype"] = "float32"
        config["parallel"]["device"] = "cpu"
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(config: Path, overrides: list[str]) -> list[str]:
    words = [sys.executable, "-m", "shardtune", "train", str(config), "--run-id", RUN]
    return words + [word for override in overrides for word in ("-o", override)]


def run_folder(folder: Path) -> Path:
    return folder / "runs" / RUN


def read_run(folder: Path, warm: int) -> dict[str, object]:
    """What the log lines after warm-up say, also of a run that was cut short; empty if there are none."""
    lines = read_lines(folder / "events-rank0.jsonl")
    steps = [line for line in lines if line["event"] == "step"]
    counted = [line for line in steps if line["step"] > warm]
    # A line counts from the one before it, which must lie behind the warm-up too.
    if not counted or warm not in {line["step"] for line in steps}:
        return {}
    profiles = [line["memory"] for line in lines if line["event"] == "profile" and "memory" in line]
    plan = next(line for line in lines if line["event"] == "plan")
    return {
        **summed_up([line["tokens_per_second"] for line in counted], counted[-1]["step"] - warm),
        **memory(profiles),
        "trainable": plan["adapters"]["trainable"],
        "loss": counted[-1]["loss"],
        "mfu": next((line["mfu"] for line in reversed(lines) if line["event"] == "profile" and "mfu" in line), None),
    }


def told_settings(folder: Path) -> dict[str, Any]:
    """The settings that decide about speed, as the run settled them."""
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    config = yaml.safe_load(path.read_text())
    wanted = {
        "model": ("torch_dtype", "base_precision", "attn_implementation", "weights"),
        "lora": ("r", "expert_r", "target_modules", "experts"),
        "data": ("max_length",),
        "train": (
            "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "packing", "optim",
            "kernels", "fused_lora", "fused_loss", "compile", "fp8_compute",
        ),
    }  # fmt: skip
    return {f"{s}.{key}": config[s][key] for s, keys in wanted.items() for key in keys if key in config.get(s, {})}
