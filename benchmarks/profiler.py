"""What does watching cost? Steps of one training with the profiler on and off, in turns, in one process.

    python benchmarks/profiler.py [--device cuda|cpu] [--blocks 12] [--steps 12] [--json out.json]

TRL's SFTTrainer trains LoRA on a random dense model (about 1.1B parameters in bf16 on a GPU, 2M on a CPU). Blocks of
steps alternate: on, off, on, off, … In an "on" block everything is there that a run has (hooks, taps, the NVML thread,
an event per step, a line every 5 steps); in an "off" block nothing is. The first 3 steps of a block are not counted:
the first is watched for its operations. A block's time is that of its other steps together, from an idle device to an
idle device.

`overhead` is the median over pairs of neighbouring blocks of (on / off) - 1; `noise` is the median difference between
two "off" blocks: an overhead below it was not measured. Both also as processor time of this process, which a busy
machine disturbs less. Prints JSON, with the medians of what the profiler measured.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

if TYPE_CHECKING:
    from shardtune.observe import LLMStepProfiler

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
WARM_UP = 3
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                  "num_key_value_heads": 4, "vocab_size": 32000},
        "length": 2048, "rows": 4,
    },
    "cpu": {
        "model": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "vocab_size": 2000},
        "length": 128, "rows": 2,
    },
}  # fmt: skip


class Alternate(TrainerCallback):
    """Passes the Trainer's calls on to the profiler in every second block, and times all blocks."""

    def __init__(self, profiler: LLMStepProfiler, steps: int, device: str) -> None:
        self.profiler, self.steps, self.device = profiler, steps, device
        self.is_on, self.began = False, (0.0, 0.0)
        self.blocks: list[tuple[bool, float, float]] = []  # on, wall seconds, processor seconds
        self.found: dict[str, Any] = {}

    def idle(self) -> tuple[float, float]:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def switch(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.is_on:
            watching = self.profiler._session
            assert watching is not None
            watching.finish()
            self.found = watching.summary()
            self.profiler.close()
        else:
            self.profiler.on_train_begin(args, state, control, **given)
        self.is_on = not self.is_on

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.switch(args, state, control, **given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.is_on:
            self.profiler.on_step_end(args, state, control, **given)
        place = state.global_step % self.steps
        if place == WARM_UP:
            self.began = self.idle()
        elif place == 0:
            wall, processor = (now - then for now, then in zip(self.idle(), self.began, strict=True))
            self.blocks.append((self.is_on, wall, processor))
            self.switch(args, state, control, **given)

    def __getattribute__(self, name: str) -> Any:
        passed_on = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_log")
        if name in passed_on and object.__getattribute__(self, "is_on"):
            return getattr(object.__getattribute__(self, "profiler"), name)
        return object.__getattribute__(self, name)


def trainer(folder: Path, device: str, steps: int, callback: TrainerCallback) -> SFTTrainer:
    from toys import toy_tokenizer

    size = SIZES[device]
    toy_tokenizer(folder / "tokenizer")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**size["model"], max_position_embeddings=4096, pad_token_id=0), dtype=dtype
        )
    ids = torch.randint(5, size["model"]["vocab_size"], (64, size["length"])).tolist()
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=size["rows"],
            max_length=size["length"], logging_steps=10**9, report_to="none", save_strategy="no", disable_tqdm=True,
            bf16=False, use_cpu=device == "cpu", gradient_checkpointing=False, learning_rate=1e-5,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[callback],
    )  # fmt: skip


def ratios(blocks: list[tuple[bool, float]]) -> dict[str, float]:
    """Neighbours are compared, so that a machine that gets slower by and by does not show as cost."""
    pairs = []
    for (on, one), (_, other) in pairwise(blocks):
        pairs.append((one / other if on else other / one) - 1)
    off = [seconds for on, seconds in blocks if not on]
    between = [abs(one / other - 1) for one, other in pairwise(off)]
    return {"overhead": round(statistics.median(pairs), 5), "noise": round(statistics.median(between), 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12, help=f"in a block, {WARM_UP} of them not counted")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    from shardtune.observe import LLMStepProfiler
    from shardtune.observe.events import EventLog

    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder), 0)
        lines = Console(file=io.StringIO(), width=120)
        profiler = LLMStepProfiler(debug_freq=5, console=lines, events=log)
        turns = Alternate(profiler, asked.steps, asked.device)
        trainer(Path(folder), asked.device, asked.blocks * asked.steps, turns).train()
        profiler.close()
    counted = asked.steps - WARM_UP
    found = {
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds_per_step": {
            name: round(statistics.median(wall / counted for on, wall, _ in turns.blocks if on == wanted), 5)
            for name, wanted in (("on", True), ("off", False))
        },
        "wall": ratios([(on, wall) for on, wall, _ in turns.blocks]),
        "processor": ratios([(on, processor) for on, _, processor in turns.blocks]),
        "blocks": len(turns.blocks),
        "profile": turns.found.get("medians", {}),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
