"""`train.gradient_checkpointing` in whole runs: none, selective and full end with the same adapter."""

from __future__ import annotations

from contextlib import redirect_stdout
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import run
from running import Command, events
from safetensors.torch import load_file
from toys import toy_config, toy_llama, toy_mistral4

from shardtune.parallel import offload
from shardtune.parallel.offload import OffloadedInputs, _Offloaded

pytestmark = pytest.mark.slow

WAYS = ("none", "selective", "full")


@pytest.fixture(scope="module")
def config(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed rows, dropout, evaluation, a sample."""
    folder = tmp_path_factory.mktemp("recompute")
    return toy_config(
        folder, toy_llama(folder / "model"), toy_data,
        lora={"lora_dropout": 0.2}, data={"val_split": "validation"}, train={"packing": True, "samples": 1},
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(config: Path) -> dict[str, Path]:
    return {way: _run_here(config, f"{way}-1", way) for way in WAYS}


@pytest.fixture(scope="module")
def sharded(shared_shardtune: Command, config: Path) -> dict[str, Path]:
    return {way: _run(shared_shardtune, config, f"{way}-2", way, "--nproc", 2) for way in WAYS[:2]}


def _run_here(config: Path, name: str, way: str) -> Path:
    with redirect_stdout(StringIO()) as said:
        assert run(config, f"train.gradient_checkpointing={way}", run_id=name) == 0
    assert f"activation checkpointing: {way}" in said.getvalue()
    return config.parent / "runs" / name


def _run(shardtune: Command, config: Path, name: str, way: str, *words: object) -> Path:
    result = shardtune(
        "train", config, "--run-id", name, "-o", f"train.gradient_checkpointing={way}", *words, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"activation checkpointing: {way}" in result.stdout
    assert "context_fn" not in result.stdout + result.stderr  # torch's warning for its own developers
    return config.parent / "runs" / name


def _hash(folder: Path) -> str:
    return sha256((folder / "final" / "adapter_model.safetensors").read_bytes()).hexdigest()


def _told(run: Path) -> dict[str, object]:
    """All that a run came to: its curve, its evaluation, the hash of its adapter."""
    curve = [(event["loss"], event["grad_norm"]) for event in events(run, "step")]
    assert len(curve) == 4
    return {"curve": curve, "eval": [event["loss"] for event in events(run, "eval")], "adapter": _hash(run)}


@pytest.mark.parametrize("way", ["selective", "full"])
def test_the_adapter_is_the_same_file(alone: dict[str, Path], way: str) -> None:
    assert _told(alone[way]) == _told(alone["none"])


def test_so_it_is_with_two_processes(sharded: dict[str, Path]) -> None:
    assert _told(sharded["selective"]) == _told(sharded["none"])


@pytest.mark.nightly
def test_compiled_it_is_the_same_within_rounding(shardtune: Command, config: Path) -> None:
    words = [w for o in ("compile=true", "max_steps=2", "samples=0", "eval_strategy=no") for w in ("-o", f"train.{o}")]
    runs = [_run(shardtune, config, f"{way}-compiled", way, *words) for way in WAYS[:2]]
    meant, own = (load_file(run / "final" / "adapter_model.safetensors") for run in runs)
    for name, tensor in meant.items():
        assert torch.allclose(own[name], tensor, rtol=1e-5, atol=1e-6), name


def test_what_is_recomputed_counts_as_executed(alone: dict[str, Path]) -> None:
    def again(way: str) -> float:
        """Operations executed for each one needed: a ratio in which the clock drops out."""
        profile = events(alone[way], "profile")[-1]
        return float(profile["hardware_tflops"] / profile["tflops"])

    assert again("none") == pytest.approx(again("selective"), rel=1e-2)
    assert again("full") > 1.1 * again("selective")


def test_the_saved_config_says_what_was_asked_for(alone: dict[str, Path]) -> None:
    said = {"none": "false", "selective": "selective", "full": "true"}
    for way, word in said.items():
        assert f"gradient_checkpointing: {word}" in (alone[way] / "config.yaml").read_text()


def test_experts_with_adapters_too(toy_data: Path, tmp_path: Path) -> None:
    config = toy_config(
        tmp_path, toy_mistral4(tmp_path / "model"), toy_data,
        lora={"target_modules": ["q_a_proj", "o_proj", "experts"]}, train={"max_steps": 2},
    )  # fmt: skip
    for way in ("none", "selective"):
        _run_here(config, way, way)
    assert _hash(tmp_path / "runs" / "none") == _hash(tmp_path / "runs" / "selective")


@pytest.mark.parametrize("moved", [True, False])
def test_inputs_that_wait_elsewhere_change_nothing(
    config: Path, alone: dict[str, Path], moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    class Noted(OffloadedInputs):
        least = 1

        def _unpack(self, packed: Any) -> Any:
            seen.append(packed)
            return super()._unpack(packed)

    if moved:  # as if a CPU had another place
        monkeypatch.setattr(offload, "has_device_memory", lambda device: True)
        monkeypatch.setattr(offload, "OffloadedInputs", Noted)
    name = f"offloaded-{moved}"
    with redirect_stdout(StringIO()) as said:
        assert run(config, "train.gradient_checkpointing=full", "train.offload_activations=true", run_id=name) == 0
    assert "train.offload_activations has no effect on a CPU" in " ".join(said.getvalue().split())
    assert any(isinstance(one, _Offloaded) for one in seen) is moved
    assert _told(config.parent / "runs" / name) == _told(alone["full"])
