"""How long until something happens? Commands that need no torch, and the first training step against bare TRL.

Everything is measured in one run, alternating, and reported as a ratio: seconds differ between machines.

    python benchmarks/startup.py [--repeats 5] [--json out.json]

What is counted:
- `--help`, `config validate`: wall time of the whole process, against `python -c pass`.
- first step: wall time from starting the process to the end of the first optimizer step, of `shardtune train` with a
  toy model in one process, against a script that does the same with TRL's SFTTrainer and PEFT alone (it loads the same
  files, tokenises the same rows and trains the same adapter, without our checks, order of rows, sharding or events).
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
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

BARE_TRL = """
import sys, time
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

model, data, out = sys.argv[1:]

class FirstStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            print("FIRST", time.time(), flush=True)

rows = load_dataset(data, split="train")
def split(row):
    return {"prompt": row["question"] + " => ", "completion": row["answer"]}

rows = rows.map(split, remove_columns=rows.column_names)
SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(model),
    processing_class=AutoTokenizer.from_pretrained(model),
    train_dataset=rows,
    args=SFTConfig(output_dir=out, max_steps=2, per_device_train_batch_size=2, use_cpu=True, bf16=False,
                   report_to="none", save_strategy="no", max_length=64, logging_steps=1, disable_tqdm=True),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[FirstStep()],
).train()
"""


def wall(command: list[str]) -> float:
    """Seconds a process takes from start to end."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def first_step_shardtune(config: Path, name: str) -> float:
    began = time.time()
    command = [sys.executable, "-m", "shardtune", "train", str(config), "--nproc", "1", "--run-id", name]
    subprocess.run(command, check=True, capture_output=True)
    lines = (config.parent / "runs" / name / "events-rank0.jsonl").read_text().splitlines()
    return next(e["time"] for e in map(json.loads, lines) if e["event"] == "step") - began


def first_step_trl(script: Path, model: Path, data: Path, out: Path) -> float:
    began = time.time()
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(data), str(out)], check=True, capture_output=True, text=True
    )
    return next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("FIRST")) - began


def measure(repeats: int, folder: Path) -> dict[str, list[float]]:
    from toys import toy_config, toy_llama, toy_rows

    model, data = toy_llama(folder / "model"), toy_rows(folder / "data")
    config = toy_config(folder, model, data, train={"max_steps": 2})
    script = folder / "bare_trl.py"
    script.write_text(BARE_TRL)
    cli = [sys.executable, "-m", "shardtune"]
    seconds: dict[str, list[float]] = {name: [] for name in ("pass", "help", "validate", "shardtune", "trl")}
    for number in range(repeats + 1):
        taken = {
            "pass": wall([sys.executable, "-c", "pass"]),
            "help": wall([*cli, "--help"]),
            "validate": wall([*cli, "config", "validate", str(config)]),
            "trl": first_step_trl(script, model, data, folder / f"trl{number}"),
            "shardtune": first_step_shardtune(config, f"run{number}"),
        }
        if number:  # the first round warms the disk cache
            for name, value in taken.items():
                seconds[name].append(value)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONPATH=str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/hf"
        seconds = measure(options.repeats, Path(folder))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"medians of {options.repeats}; cores: {os.cpu_count()}, python {sys.version.split()[0]}")
    print(f"{'python -c pass':<42}{median['pass']:8.3f} s")
    for name, label in (("help", "shardtune --help"), ("validate", "shardtune config validate")):
        print(f"{label:<42}{median[name]:8.3f} s  {median[name] / median['pass']:6.1f} × python -c pass")
    print(f"{'first step, bare TRL script':<42}{median['trl']:8.3f} s")
    ratio = median["shardtune"] / median["trl"]
    print(f"{'first step, shardtune train':<42}{median['shardtune']:8.3f} s  {ratio:6.2f} × bare TRL")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "median": median, "first_step_ratio": ratio}, indent=2))


if __name__ == "__main__":
    main()
