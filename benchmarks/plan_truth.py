"""Does `plan` tell the truth? Predicted against measured peak memory and step time of settings chosen beforehand.

    python benchmarks/plan_truth.py measure OUT.json [NAME …] [--budget 540]   on a GPU, each in its own process
    python benchmarks/plan_truth.py compare benchmarks/plan_truth.json         anywhere: prints the table

Measured: the most bytes in tensors (`torch.cuda.max_memory_allocated`, evaluation included), and the median wall time
of the last three optimizer steps. OUT.json is written after every setting; what it holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from apart import nvml_memory, run_apart, wait_for_memory
from cases import Case, write_model, write_rows
from cases import shape_of as benchmark_shape
from machine import about_machine
from ours import RUN, command
from speed import why_it_failed
from windows import read_lines

ROOT = Path(__file__).parent.parent
_WARM, _COUNTED = 2, 3  # steps: the first compiles
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "dtype": "bfloat16", "pad_token_id": 1, "use_cache": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.1B": {**_LLAMA, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True},
    "1B": {**_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    "4B": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
           "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "8B": {**_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
    "A3B": {**_LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True, "num_hidden_layers": 12,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A run: a model of `SHAPES`, or Mistral Small 4 cut to its first layers (`moe8`); rows; sections of the config."""

    model: str
    batch: int
    length: int
    checkpointing: str = "none"
    short: bool = False
    validates: bool = False
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)


_FP8 = {"model": {"base_precision": "fp8"}}
_FP8_PRODUCTS = {**_FP8, "train": {"fp8_compute": True}}
_OFFLOADED = {"train": {"offload_activations": True}}
# Chosen before any of them was measured.
SETTINGS: dict[str, Setting] = {
    "0.1B 16x1024 none, packed": Setting("0.1B", 16, 1024, short=True),
    "0.1B 8x2048 full": Setting("0.1B", 8, 2048, "full"),
    "1B 8x2048 none": Setting("1B", 8, 2048),
    "1B 4x4096 selective": Setting("1B", 4, 4096, "selective"),
    "1B 1x32768 full": Setting("1B", 1, 32768, "full"),
    "1B 8x1024 none, evaluation 16x1024": Setting(
        "1B", 8, 1024, validates=True, sets={"train": {"per_device_eval_batch_size": 16}}
    ),
    "1B 4x1024 none, eager kernels": Setting("1B", 4, 1024, sets={"train": {"kernels": "eager"}}),
    "4B 4x4096 none": Setting("4B", 4, 4096),
    "4B 2x8192 selective": Setting("4B", 2, 8192, "selective"),
    "8B 2x4096 none, packed": Setting("8B", 2, 4096, short=True),
    "8B 8x2048 selective": Setting("8B", 8, 2048, "selective"),
    "8B 1x65536 full, offloaded activations": Setting("8B", 1, 65536, "full", sets=_OFFLOADED),
    "8B 1x32768 full": Setting("8B", 1, 32768, "full"),
    "8B 4x4096 none, FP8": Setting("8B", 4, 4096, sets=_FP8),
    "8B 4x4096 selective, FP8 products": Setting("8B", 4, 4096, "selective", sets=_FP8_PRODUCTS),
    "8B 2x4096 full, offloaded parameters": Setting("8B", 2, 4096, "full", sets={"parallel": {"offload_params": True}}),
    "8B 4x4096 none, LoRA 64 on attention": Setting(
        "8B", 4, 4096, sets={"lora": {"r": 64, "lora_alpha": 64, "target_modules": "attention"}}
    ),
    "A3B 12 layers 4x2048 none": Setting("A3B", 4, 2048),
    "Mistral 4, 2 layers 8x4096 none": Setting("moe2", 8, 4096),
    "Mistral 4, 4 layers 4x4096 selective, experts": Setting(
        "moe4", 4, 4096, "selective",
        sets={"lora": {"target_modules": ["attention", "mlp"], "experts": True, "expert_r": 8}},
    ),
    "Mistral 4, 8 layers 2x8192 none, FP8": Setting("moe8", 2, 8192, sets=_FP8),
    "Mistral 4, 119B 2x4096 full, FP8 products": Setting("moe36", 2, 4096, "full", sets=_FP8_PRODUCTS),
    "Mistral 4, 119B 8x4096 full, FP8, offloaded activations": Setting(
        "moe36", 8, 4096, "full", sets={**_FP8, **_OFFLOADED}
    ),
    "8B 8x4096 none": Setting("8B", 8, 4096),  # does not fit by rough arithmetic: the plan must not say that it does
}  # fmt: skip


def shape_of(setting: Setting) -> dict[str, Any]:
    return SHAPES.get(setting.model) or dict(benchmark_shape(setting.model))


def write_config(setting: Setting, folder: Path, *, steps: int = _WARM + _COUNTED) -> Path:
    """Everything a run of the setting needs, in `folder`; returns its config file."""
    shape = shape_of(setting)
    model = write_model(folder / "model", shape)
    case = Case(setting.model, length=setting.length, batch=setting.batch, short=setting.short)
    rows = steps * (2 if setting.validates else 1)
    data = write_rows(folder / "rows.jsonl", case, rows, int(shape["vocab_size"]))
    config: dict[str, Any] = {
        "model": {"model_name_or_path": str(model), "weights": "random"},
        "data": {
            "dataset_name_or_path": str(data), "max_length": setting.length, "cache_dir": str(folder / "prepared"),
        },
        "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0},
        "train": {
            "output_dir": str(folder / "runs"), "max_steps": steps, "per_device_train_batch_size": setting.batch,
            "gradient_checkpointing": setting.checkpointing, "save_strategy": "no", "logging_steps": 1,
            "resume": "never",
        },
        "parallel": {"nproc": 1},
    }  # fmt: skip
    if setting.validates:
        config["data"]["val_split"] = 0.5
        config["train"] |= {"eval_steps": steps - 1}
    for section, values in setting.sets.items():
        config[section] |= values
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure(name: str, limit: float, log: Path) -> dict[str, Any]:
    """Train a few steps of a setting in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="truth-") as place:
        folder = Path(place)
        path = write_config(SETTINGS[name], folder)
        ended = run_apart(command(path, []), log, limit, _environment())
        lines = read_lines(folder / "runs" / RUN / "events-rank0.jsonl")
        resolved = folder / "runs" / RUN / "config.yaml"
        settled = yaml.safe_load(resolved.read_text()) if resolved.exists() else {}
    profiles = [line for line in lines if line["event"] == "profile"]
    counted = [line for line in profiles if line["step"] > _WARM]
    result: dict[str, Any] = {"wall_seconds": round(ended.seconds, 1), "config": _telling(settled)}
    if not counted:
        return result | {"why": "took too long" if ended.code is None else why_it_failed(log, ended.code)}
    ends = [line for line in lines if line["event"] == "run_end"]
    return result | {
        "peak": max(line["memory"]["peak"] for line in profiles),
        "reserved": max(line["memory"]["reserved"] for line in profiles),
        "run_end": ends[-1] if ends else None,
        "step_seconds": statistics.median(line["seconds"]["step"] for line in counted),
        "profile": counted[-1],
    }


def _telling(config: dict[str, Any]) -> dict[str, Any]:
    """The sections that memory and time depend on."""
    return {name: config.get(name, {}) for name in ("model", "data", "lora", "train", "parallel")}


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def measure_all(out: Path, names: list[str], budget: float) -> None:
    told = json.loads(out.read_text()) if out.exists() else {"about": about_machine(None, ROOT, None), "settings": {}}
    in_use, deadline = nvml_memory(), time.monotonic() + budget
    free = in_use()
    for name in names or list(SETTINGS):
        if "peak" in told["settings"].get(name, {}) or deadline - time.monotonic() < 30:
            continue
        wait_for_memory(in_use, free)
        log = out.parent / f"{name.replace(' ', '_').replace(',', '')}.log"
        told["settings"][name] = measure(name, min(240.0, deadline - time.monotonic()), log)
        out.write_text(json.dumps(told, indent=1))
        found = told["settings"][name]
        print(name, found.get("why") or f"{found['peak'] / 2**30:.2f} GiB, {found['step_seconds']:.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; what is not begun by then is left out")
    given = parser.parse_args()
    if given.what == "measure":
        measure_all(given.file, given.names, given.budget)


if __name__ == "__main__":
    main()
