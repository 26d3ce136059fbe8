"""The whole way as a toy: our run, the references, the file, the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import REPOSITORY

# What `unsloth_step.py` asks of Unsloth, by PEFT and transformers.
UNSLOTH = """
class FastLanguageModel:
    def from_pretrained(folder, max_seq_length, load_in_4bit, dtype, local_files_only):
        from transformers import AutoModelForCausalLM
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), None

    def get_peft_model(model, use_gradient_checkpointing, **given):
        from peft import LoraConfig, get_peft_model
        return get_peft_model(model, LoraConfig(**given))
"""


@pytest.mark.slow
def test_the_whole_way_as_a_toy(tmp_path: Path, environment: dict[str, str]) -> None:
    site = tmp_path / "site"
    (site / "unsloth").mkdir(parents=True)
    (site / "unsloth" / "__init__.py").write_text(UNSLOTH)
    words = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu" / "speed.py"), "--tiny", "--rows", "dense,short"]
    words += ["--out", str(tmp_path / "out"), "--unsloth-site", str(site), "--commit", "abc1234"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "speed.json").read_text())
    failed = {name: one["why"] for name, one in told["measurements"].items() if "why" in one}
    assert set(failed) <= {"stock-dense-liger"}, failed
    for one in told["measurements"].values():
        if "why" not in one:
            assert one["tokens_per_second"] > 0 and one["steps_counted"] >= 2
            assert one["trainable"] == told["measurements"]["dense-4k"]["trainable"]
    # Rows of different lengths are packed by ours, and by TRL where it is told to.
    assert told["measurements"]["dense-short"]["settings"]["train.packing"] is True
    assert told["about"]["commit"] == "abc1234" and told["about"]["tiny"] is True
    table = done.stdout.splitlines()
    assert any(line.startswith("dense-4k") and "unsloth-dense" in line and "×" in line for line in table)
    assert any(line.startswith("dense-short") and "stock-dense-classic" in line for line in table)
