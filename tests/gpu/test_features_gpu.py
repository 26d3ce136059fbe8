"""Every feature on a GPU through the command line: compiled layers and offloading give the losses of eager code there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import REPOSITORY, events
from support.features import ON_GPU, PLAIN, WHAT
from toys import save_toy, toy_config, toy_rows, toy_text_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDE: dict[str, object] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
                           "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 128}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("features")
    biased = {"attention_bias": True, "mlp_bias": True}
    save_toy(transformers.LlamaForCausalLM, toy_text_config("llama", **{**WIDE, **biased}), folder / "dense")
    save_toy(transformers.MixtralForCausalLM, toy_text_config("mixtral", **WIDE), folder / "mixture")
    toy_rows(
        folder / "data", rows=8, val_rows=5
    )  # all in one batch: packing changes how a step is computed, never what
    return folder


def losses(folder: Path, what: str, how: str, overrides: list[str]) -> list[float]:
    model = "mixture" if what == "expert LoRA" else "dense"
    run_id = f"{what} {how}".replace(" ", "-")
    config = toy_config(
        folder, folder / model, folder / "data", lora={"target_modules": "all-linear"},
        model={"torch_dtype": "bfloat16"}, data={"val_split": "validation"}, parallel={"device": "cuda"},
        train={"max_steps": 6, "per_device_train_batch_size": 8, "eval_steps": 6, "learning_rate": 1e-3, "samples": 0},
    )  # fmt: skip
    config = config.rename(folder / f"{run_id}.yaml")
    asked = [word for each in overrides for word in ("-o", each)]
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", "train", str(config), "--run-id", run_id, *asked],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / run_id
    return [*(event["loss"] for event in events(run, "step")), events(run, "eval")[-1]["loss"]]


@pytest.mark.parametrize("what", WHAT)
def test_a_feature_trains_on_a_gpu_with_the_losses_of_eager_code(folder: Path, what: str) -> None:
    plain = losses(folder, what, "plain", [*WHAT[what], *PLAIN])
    assert plain[-2] < plain[0]
    for how, overrides in ON_GPU.items():
        found = losses(folder, what, how, [*WHAT[what], *PLAIN[1:], *overrides])
        print(what, how, plain, found)
        assert found == pytest.approx(plain, rel=1e-2), how
