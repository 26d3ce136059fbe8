"""Merging takes the memory of a few rows, not of the model: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toys import big_llama

_MEASURE = """
import json, sys, time
from pathlib import Path
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from shardtune.checkpoint.adapter import write_adapter_files
from shardtune.config.schema import ModelSection
from shardtune.export.log import ConsoleLog
from shardtune.export.merged import prepare
from shardtune.export.request import ExportRequest
from shardtune.inference.source import find_tuned
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers

folder = Path(sys.argv[1])
base = folder / "base"
config = LoraConfig(r=8, task_type="CAUSAL_LM", base_model_name_or_path=str(base), target_modules="all-linear")
meta = build_meta_model(ModelSection(model_name_or_path=str(base)), base, read_headers(base)).model
shapes = get_peft_model_state_dict(PeftModel(meta, config, low_cpu_mem_usage=True))
write_adapter_files(config, {n: torch.randn(t.shape) * 0.1 for n, t in shapes.items()}, folder / "adapter")
del meta, shapes
out = folder / "out"
out.mkdir()

def peak():  # since this program was started; ru_maxrss begins with that of the process that forked it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

export = prepare(ExportRequest(find_tuned(str(folder / "adapter")), "merged", out, max_shard_bytes=1_000_000_000))
before, began = peak(), time.monotonic()
export.write(out, ConsoleLog())
written, middle = peak(), time.monotonic()
verified = export.verify(out, ConsoleLog())
print(json.dumps({
    "bytes": export.nbytes, "before": before, "written": written, "verified": peak(), "by": verified.method,
    "seconds": [middle - began, time.monotonic() - middle], **verified.figures,
}))
"""


@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_model(tmp_path: Path) -> None:
    size = big_llama(tmp_path / "base", 3.2)
    assert size > 3_000_000_000
    measured = subprocess.run([sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout.splitlines()[-1])
    assert found["bytes"] == pytest.approx(size, rel=0.01)
    # Nothing is mapped, so that no pages of files are counted.
    assert found["written"] - found["before"] < 400_000_000, found
    assert found["by"] == "logits" and found["surviving_delta"] > 0.9, found
    assert found["verified"] < 2_000_000_000, found  # embedding, head and a layer in float32, not the model
