"""Several processes on one GPU under each mesh (gloo, CUDA tensors): the curve of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import REPOSITORY, events
from toys import save_toy, toy_config, toy_text_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANK = Path(__file__).parent / "one_card.py"
WIDE: dict[str, object] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
                           "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 128}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object], dict[str, dict[str, object]]]] = {
    "dense, float32": ("llama", WIDE, {"model": {"torch_dtype": "float32"}}),
    "fp8 base": ("llama", WIDE, {"model": {"base_precision": "fp8"}}),
    "expert lora": (
        "mixtral",
        {**WIDE, "intermediate_size": 128},
        {"lora": {"target_modules": ["attention", "mlp"], "experts": True, "expert_r": 4}},
    ),
}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, {}),
    "full": (2, {"shard": "full"}),
    "replicate": (2, {"shard": "replicate"}),
    "hybrid": (4, {"shard": "hybrid", "shard_size": 2}),
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def trained(folder: Path, data: Path, model: Path, mesh: str, settings: dict[str, dict[str, object]]) -> Path:
    """One `shardtune train` per rank, all on the first GPU, two to a node."""
    world, parallel = MESHES[mesh]
    sections: dict[str, dict[str, object]] = {
        "model": {"torch_dtype": "bfloat16"},
        "lora": {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0},
        "data": {"val_split": "validation"},
        "train": {"max_steps": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // world,
                  "learning_rate": 0.01, "eval_steps": 2, "samples": 0, "debug_freq": 1,
                  "compile": False},
    }  # fmt: skip
    for name, section in settings.items():
        sections[name] = {**sections.get(name, {}), **section}
    if mesh in ("replicate", "hybrid"):
        sections["model"]["load"] = "read-once"
    (folder / mesh).mkdir()
    config = toy_config(folder / mesh, model, data, **sections, parallel={"device": "cuda", **parallel})
    rendezvous = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, "train", config, "--run-id", mesh],
            env={**os.environ, **rendezvous, "PYTHONPATH": path, "RANK": str(rank), "LOCAL_RANK": "0",
                 "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank // 2)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = []
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    return folder / mesh / "runs" / mesh


def curve(run: Path) -> dict[str, list[float]]:
    lines = events(run, "step")
    return {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "final" / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", MODELS)
def test_every_mesh_trains_as_one_process_does(kind: str, tmp_path: Path, toy_data: Path) -> None:
    from transformers import AutoModelForCausalLM

    model_type, changes, settings = MODELS[kind]
    model = save_toy(AutoModelForCausalLM.from_config, toy_text_config(model_type, **changes), tmp_path / "model")
    runs = {mesh: trained(tmp_path, toy_data, model, mesh, settings) for mesh in MESHES}
    tolerance: dict[str, Any] = {"rel": 1e-4} if "float32" in kind else {"rel": 0.03}
    one = curve(runs["one"])
    for mesh in ("full", "replicate", "hybrid"):
        for name, numbers in curve(runs[mesh]).items():
            assert numbers == pytest.approx(one[name], **tolerance), (mesh, name)
        if "float32" in kind:
            for name, tensor in weights(runs[mesh]).items():
                torch.testing.assert_close(tensor, weights(runs["one"])[name], rtol=1e-3, atol=1e-4)
    sent = {mesh: events(run, "profile")[-1]["collectives"] for mesh, run in runs.items() if mesh != "one"}
    trainable = events(runs["one"], "plan")[0]["adapters"]["trainable"]
    assert sent["replicate"]["shard"] <= trainable * 8 < sent["full"]["shard"]
    assert 0 < sent["hybrid"]["replicate"] <= trainable * 4
