"""How fast is it? Each case through `shardtune train`: `benchmarks/gpu/speed.py dense-4k moe8,train.compile=false`.

Tokens per second are real tokens (no padding) over wall time between two log lines, median of the lines after warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from cases import DENSE_7B, mistral4, write_model, write_rows


@dataclass(frozen=True)
class Case:
    model: str
    length: int = 4096
    batch: int = 2
    short: bool = False
    steps: int = 25
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)


def train(**given: Any) -> dict[str, dict[str, Any]]:
    return {"train": given}


CASES = {
    "dense-4k": Case("dense"),
    "dense-4k-unpacked": Case("dense", sets=train(packing=False)),
    "dense-4k-eager": Case("dense", batch=1, sets=train(kernels="eager")),
    "dense-4k-nocompile": Case("dense", sets=train(compile=False)),
    "dense-fp8": Case("dense", sets={"model": {"base_precision": "fp8"}, "train": {"packing": False}}),
    "dense-short": Case("dense", short=True),
    "moe8": Case("moe8", batch=4),
    "moe8-ckpt": Case("moe8", batch=4, sets=train(gradient_checkpointing=True)),
    "moe8-fp8": Case(
        "moe8", batch=4, sets={"model": {"base_precision": "fp8"}, "train": {"gradient_checkpointing": True}}
    ),
    "moe36-fp8": Case(
        "moe36", batch=8, steps=10, sets={"model": {"base_precision": "fp8"}, "train": {"gradient_checkpointing": True}}
    ),
}
LOG, WARM = 3, 6


def config_of(case: Case, folder: Path) -> Path:
    shape = DENSE_7B if case.model == "dense" else mistral4(int(case.model.removeprefix("moe")))
    model = write_model(folder / case.model, shape)
    tokens = case.batch * case.length * case.steps
    rows = tokens // 200 if case.short else tokens // case.length
    data = write_rows(
        folder / "rows.jsonl", rows=rows, length=case.length, short=case.short, vocabulary=int(str(shape["vocab_size"]))
    )
    config: dict[str, Any] = {
        "model": {"model_name_or_path": str(model), "weights": "random"},
        "data": {"dataset_name_or_path": str(data), "max_length": case.length},
        "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0},
        "train": {
            "output_dir": str(folder / "runs"), "max_steps": case.steps, "per_device_train_batch_size": case.batch,
            "gradient_checkpointing": False, "optim": "adamw_torch_fused", "save_strategy": "no", "logging_steps": LOG,
            "debug_freq": 6,
        },
    }  # fmt: skip
    for section, values in case.sets.items():
        config[section] |= values
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure(name: str, overrides: list[str], keep: Path | None, limit: float) -> dict[str, Any]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as place:
        config = config_of(case, Path(place))
        words = [sys.executable, "-m", "shardtune", "train", str(config), "--run-id", "bench"]
        for override in overrides:
            words += ["-o", override]
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        began = time.time()
        log = (keep or Path(place)) / f"{name}.log"
        with log.open("w") as out:
            try:
                code = subprocess.run(
                    words, stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=limit
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        events = Path(place) / "runs/bench/events-rank0.jsonl"
        if code != 0 and not events.exists():
            return {"case": name, "error": (log.read_text().strip().splitlines() or ["?"])[-1][:300]}
        lines = [json.loads(line) for line in events.read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step" and line["step"] > WARM]
    if not steps:
        return {"case": name, "error": "no step after warm-up", "last": lines[-1]}
    profile = [line for line in lines if line["event"] == "profile"]
    rates = [line["tokens_per_second"] for line in steps]
    return {
        "case": name, "overrides": overrides, "tokens_per_second": round(statistics.median(rates)),
        "slowest": round(min(rates)), "fastest": round(max(rates)), "loss": steps[-1]["loss"],
        "peak_gib": round(max(line["memory"]["peak"] for line in profile) / 2**30, 1),
        "wall_seconds": round(time.time() - began, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="names, perhaps with settings: dense-4k,train.compile=false")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=240, help="seconds a case may take")
    asked = parser.parse_args()
    found = []
    for word in asked.cases:
        name, *overrides = word.split(",")
        found.append(measure(name, overrides, asked.out, asked.limit))
        print("RESULT " + json.dumps(found[-1]), flush=True)
    if asked.out is not None:
        (asked.out / "speed.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
