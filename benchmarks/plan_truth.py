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
from dataclasses import dataclass, field, replace
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

from shardtune.config import load_config
from shardtune.model.meta_model import build_meta_model
from shardtune.plan.catalogue import shipped_cluster
from shardtune.plan.facts import Machine
from shardtune.plan.gather import gather_facts
from shardtune.plan.memory import gpu_memory, usable
from shardtune.plan.resolve import resolve
from shardtune.plan.step_time import step_time
from shardtune.plan.work import work_of

H200 = Machine("cuda", memory=150_121_414_656, processes_here=1, nodes=(1,), gpu="NVIDIA H200")
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
    # Of 8B, drawing random weights in host memory took longer than the limit.
    "1B 4x4096 full, offloaded parameters": Setting("1B", 4, 4096, "full", sets={"parallel": {"offload_params": True}}),
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
    # Chosen after host times were corrected by those above.
    "0.1B 4x512 none": Setting("0.1B", 4, 512),
    "4B 8x1024 full": Setting("4B", 8, 1024, "full"),
    "8B 8x4096 none": Setting("8B", 8, 4096),  # does not fit by rough arithmetic: the plan must not say that it does
}  # fmt: skip


def shape_of(setting: Setting) -> dict[str, Any]:
    return SHAPES.get(setting.model) or dict(benchmark_shape(setting.model))


def write_config(setting: Setting, folder: Path, *, steps: int = _WARM + _COUNTED) -> Path:
    """Everything a run of the setting needs, in `folder`; returns its config file."""
    shape = shape_of(setting)
    model = write_model(folder / "model", shape)
    case = Case(setting.model, length=setting.length, batch=setting.batch, short=setting.short)
    rows = steps * (4 if setting.validates else 1)
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


@dataclass(frozen=True)
class Row:
    """What was predicted of a setting, and what was measured: bytes, seconds. None: it ran out of memory."""

    name: str
    allocated: int
    total: int
    known_by: str
    fits: bool
    seconds: float
    peak: int | None
    step: float | None


def predict(name: str, folder: Path, measured: dict[str, Any]) -> Row:
    """What `plan` says of a setting on one H200."""
    setting = SETTINGS[name]
    write_model(folder / "model", shape_of(setting))
    sections: dict[str, Any] = json.loads(json.dumps(setting.sets))
    overrides = {
        "model": {"model_name_or_path": str(folder / "model"), "weights": "random"},
        "data": {"dataset_name_or_path": "rows.jsonl", "max_length": setting.length},
        "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0},
        "train": {
            "per_device_train_batch_size": setting.batch,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": setting.checkpointing,
        },
        "parallel": {},
        "guards": {"memory_plan": "off"},
    }
    if setting.validates:
        overrides["data"]["val_split"] = 0.5
    for section, values in sections.items():
        overrides[section] |= values
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(overrides))
    asked = load_config(file)
    meta = build_meta_model(asked.config.model, folder / "model", {})
    facts = gather_facts(asked.config, meta.outline, H200, lambda: 0.05 if setting.short else 1.0)
    config = resolve(asked, facts).config
    work = replace(work_of(config, facts), document=250.0 if setting.short else float(setting.length))
    memory = gpu_memory(facts, work)
    fits = memory.total <= usable(H200.memory, "cuda")
    seconds = step_time(facts, work, shipped_cluster(H200)).seconds
    return Row(
        name, memory.allocated, memory.total, memory.known_by, fits, seconds, measured.get("peak"),
        measured.get("step_seconds"),
    )  # fmt: skip


def compare(file: Path) -> list[Row]:
    """A line for each setting that was measured, or that ran out of memory."""
    rows = []
    for name, measured in json.loads(file.read_text())["settings"].items():
        if "peak" in measured or "memory" in str(measured.get("why")):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(predict(name, Path(folder), measured))
    return rows


def table(rows: list[Row]) -> str:
    """Predicted and measured, with the error of each; then the errors of all."""
    lines = [f"{'':55} {'GiB':>7} {'measured':>9} {'error':>7}   {'step s':>7} {'measured':>9} {'error':>7}"]
    for row in rows:
        peak = (
            f"{row.peak / 2**30:9.2f} {row.allocated / row.peak - 1:+7.1%}" if row.peak else f"{'no memory':>9} {'':7}"
        )
        step = f"{row.step:9.3f} {row.seconds / row.step - 1:+7.1%}" if row.step else ""
        verdict = "" if row.fits else "  does not fit"
        lines.append(f"{row.name:55} {row.allocated / 2**30:7.2f} {peak}   {row.seconds:7.3f} {step}{verdict}")
    memory = [abs(row.allocated / row.peak - 1) for row in rows if row.peak]
    times = [abs(row.seconds / row.step - 1) for row in rows if row.step]
    for what, errors in (("memory", memory), ("step time", times)):
        lines.append(f"{what}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)}")
    wrong = [row.name for row in rows if row.fits and not row.peak]
    lines.append(f"out of memory, but predicted to fit: {', '.join(wrong) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; what is not begun by then is left out")
    given = parser.parse_args()
    if given.what == "measure":
        measure_all(given.file, given.names, given.budget)
    else:
        print(table(compare(given.file)))


if __name__ == "__main__":
    main()
