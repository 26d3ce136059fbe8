"""`model.torch_dtype: auto`: what the checkpoint is stored in decides, and products follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from interrupted import lines, run
from toys import toy_config, toy_llama


def stored_in(dtype: torch.dtype, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    toy_llama(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("stored", "held", "mixed"),
    [
        pytest.param(torch.float32, "float32", False, marks=pytest.mark.slow),
        (torch.bfloat16, "bfloat16", True),
        pytest.param(torch.float16, "bfloat16", True, marks=pytest.mark.slow),  # float16 would need loss scaling
    ],
)
def test_auto_trains_as_if_the_dtype_had_been_named(
    stored: torch.dtype, held: str, mixed: bool, toy_data: Path, tmp_path: Path
) -> None:
    config = toy_config(
        tmp_path, stored_in(stored, tmp_path / "model"), toy_data, model={"torch_dtype": "auto"}, train={"max_steps": 2}
    )
    assert run(config, run_id="auto") == 0
    settled = yaml.safe_load((tmp_path / "runs" / "auto" / "config.yaml").read_text())
    assert (settled["model"]["torch_dtype"], settled["train"]["bf16"]) == (held, mixed)
    assert run(config, f"model.torch_dtype={held}", run_id="named") == 0
    assert lines(tmp_path / "runs" / "auto") == lines(tmp_path / "runs" / "named")
