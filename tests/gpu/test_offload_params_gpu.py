"""`parallel.offload_params` on a GPU: the curve of a run without it, with parameters on the host and buffers on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import REPOSITORY, events
from toys import save_toy, toy_config, toy_text_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WORKER = Path(__file__).parent / "offload_params_worker.py"
WIDE: dict[str, object] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
                           "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 128}  # fmt: skip
EXPERTS: dict[str, object] = {**WIDE, "intermediate_size": 128}
# model type, its config, settings beside the usual ones
CASES: dict[str, tuple[str, dict[str, object], dict[str, dict[str, object]]]] = {
    "dense": ("llama", WIDE, {}),
    "eager": ("llama", WIDE, {"train": {"kernels": "eager"}}),
    "float32": ("llama", WIDE, {"model": {"torch_dtype": "float32"}}),
    "recomputed": ("llama", WIDE, {"train": {"gradient_checkpointing": True, "offload_activations": True}}),
    "accumulated": ("llama", WIDE, {"train": {"gradient_accumulation_steps": 2}}),
    "tied, biases": ("phi", {**WIDE, "tie_word_embeddings": True}, {"lora": {"bias": "all"}}),
    "fp8 base": ("llama", WIDE, {"model": {"base_precision": "fp8"}}),
    "expert lora": (
        "mixtral",
        EXPERTS,
        {"lora": {"target_modules": ["attention", "mlp"], "experts": True, "expert_r": 4}},
    ),
    "expert lora, fp8": (
        "mixtral",
        EXPERTS,
        {"lora": {"target_modules": ["attention", "mlp"], "experts": True}, "model": {"base_precision": "fp8"}},
    ),
}


def trained(case: str, folder: Path, data: Path, environment: dict[str, str], *sessions: dict[str, Any]) -> Path:
    """All sessions of a case in one process, so that a hang or a crash costs this case alone."""
    from transformers import AutoModelForCausalLM

    model_type, changes, settings = CASES[case]
    model = save_toy(AutoModelForCausalLM.from_config, toy_text_config(model_type, **changes), folder / "model")
    sections: dict[str, dict[str, object]] = {
        "model": {"torch_dtype": "bfloat16"},
        "lora": {"target_modules": ["q_proj", "v_proj"]},
        "data": {"val_split": "validation"},
        "train": {"max_steps": 6, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "samples": 0},
        "parallel": {"device": "cuda"},
    }
    for name, section in settings.items():
        sections[name] = {**sections.get(name, {}), **section}
    config = toy_config(folder, model, data, **sections)
    own = (REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests" / "train")
    paths = os.pathsep.join(map(str, filter(None, (*own, os.environ.get("PYTHONPATH")))))
    done = subprocess.run(
        [sys.executable, str(WORKER), str(config), json.dumps(sessions)],
        env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    print(done.stdout, done.stderr, sep="\n")  # pytest shows all of it when the case fails
    assert done.returncode == 0, f"exit {done.returncode}: see the output above"
    return folder / "runs"


@pytest.mark.parametrize("case", CASES)
def test_the_curve_is_that_of_parameters_on_the_device(
    case: str, tmp_path: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    host = {"run_id": "host", "overrides": ["parallel.offload_params=true"]}
    runs = trained(case, tmp_path, toy_data, environment, {"run_id": "device"}, host)
    for kind, numbers in (("step", ("loss", "grad_norm")), ("eval", ("loss",))):
        for number in numbers:
            on_device, on_host = ([event[number] for event in events(runs / name, kind)] for name in ("device", "host"))
            print(case, kind, number, on_device, on_host)
            assert on_host == pytest.approx(on_device, rel=1e-4 if case == "float32" else 2e-2)
    places = {name: json.loads((runs / name / "devices.json").read_text()) for name in ("device", "host")}
    print(case, places)
    assert set(places["host"]["parameters"]) == {"cpu"} and set(places["device"]["parameters"]) == {"cuda"}
    assert set(places["host"]["buffers"]) == {"cuda"}
    assert places["host"]["pinned"]["yes"] == places["host"]["parameters"]["cpu"]


@pytest.mark.parametrize("case", ["dense", "tied, biases"])
def test_a_run_resumed_from_a_checkpoint_goes_on_where_it_was(
    case: str, tmp_path: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    more = {"overrides": ["parallel.offload_params=true"]}
    runs = trained(
        case, tmp_path, toy_data, environment,
        {"run_id": "whole", **more}, {"run_id": "cut", "crash_at": 4, **more}, {"run_id": "cut", **more},
    )  # fmt: skip
    assert [event["step"] for event in events(runs / "cut", "resume")] == [4]
    whole, cut = ({e["step"]: e["loss"] for e in events(runs / name, "step")} for name in ("whole", "cut"))
    print(whole, cut)
    assert cut == pytest.approx(whole, rel=1e-3)


def test_less_of_the_device_is_held(tmp_path: Path, toy_data: Path, environment: dict[str, str]) -> None:
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    CASES["large"] = ("llama", {**WIDE, **large, "num_attention_heads": 16, "num_key_value_heads": 16}, {})
    host = {"run_id": "host", "overrides": ["parallel.offload_params=true"]}
    runs = trained("large", tmp_path, toy_data, environment, {"run_id": "device"}, host)
    peaks = [json.loads((runs / name / "devices.json").read_text())["peak"] for name in ("device", "host")]
    print(peaks)
    assert peaks[1] < 0.6 * peaks[0]
