"""`train.gradient_checkpointing` in whole runs: none, selective and full end with the same adapter."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from running import Command, events
from safetensors.torch import load_file
from toys import toy_config, toy_llama, toy_mistral4

pytestmark = pytest.mark.slow

WAYS = ("none", "selective", "full")


@pytest.fixture(scope="module")
def dense(shardtune: Command, toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed rows, dropout, evaluation, one and two processes; and compiled."""
    folder = tmp_path_factory.mktemp("recompute")
    config = toy_config(
        folder, toy_llama(folder / "model"), toy_data,
        lora={"lora_dropout": 0.2}, data={"val_split": "validation"}, train={"packing": True, "samples": 1},
    )  # fmt: skip
    runs: list[str] = []
    for nproc in (1, 2):
        for way in WAYS if nproc == 1 else WAYS[:2]:
            runs.append(_run(shardtune, config, f"{way}-{nproc}", way, "--nproc", nproc))
    for way in WAYS[:2]:
        runs.append(_run(shardtune, config, f"{way}-compiled", way, "-o", "train.compile=true"))
    return {name: folder / "runs" / name for name in runs}


def _run(shardtune: Command, config: Path, name: str, way: str, *words: object) -> str:
    result = shardtune(
        "train", config, "--run-id", name, "-o", f"train.gradient_checkpointing={way}", *words, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"recompute {way}:" in result.stdout
    assert "context_fn" not in result.stdout + result.stderr
    return name


def _hash(run: Path) -> str:
    return sha256((run / "final" / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(("way", "nproc"), [("selective", 1), ("full", 1), ("selective", 2)])
def test_the_adapter_is_the_same_file(dense: dict[str, Path], way: str, nproc: int) -> None:
    own, meant = dense[f"{way}-{nproc}"], dense[f"none-{nproc}"]
    for number in ("loss", "grad_norm"):
        curve = [event[number] for event in events(meant, "step")]
        assert len(curve) == 4 and [event[number] for event in events(own, "step")] == curve
    assert [e["eval_loss"] for e in events(own, "eval")] == [e["eval_loss"] for e in events(meant, "eval")]
    assert _hash(own) == _hash(meant)


def test_compiled_it_is_the_same_within_rounding(dense: dict[str, Path]) -> None:
    own, meant = (load_file(dense[f"{way}-compiled"] / "final" / "adapter_model.safetensors") for way in WAYS[1::-1])
    for name, tensor in meant.items():
        assert torch.allclose(own[name], tensor, rtol=1e-5, atol=1e-6), name


def test_what_is_recomputed_counts_as_executed(dense: dict[str, Path]) -> None:
    def again(way: str) -> float:
        """Operations executed for each one needed, without the clock."""
        profile = events(dense[f"{way}-1"], "profile")[-1]
        return float(profile["hardware_tflops"] / profile["tflops"])

    assert again("none") == pytest.approx(again("selective"), rel=1e-3)
    assert again("full") > 1.1 * again("selective")


def test_the_saved_config_says_what_was_asked_for(dense: dict[str, Path]) -> None:
    said = {"none": "false", "selective": "selective", "full": "true"}
    for way, word in said.items():
        assert f"gradient_checkpointing: {word}" in (dense[f"{way}-1"] / "config.yaml").read_text()


def test_experts_with_adapters_too(shardtune: Command, toy_data: Path, tmp_path: Path) -> None:
    config = toy_config(
        tmp_path, toy_mistral4(tmp_path / "model"), toy_data,
        lora={"target_modules": ["q_a_proj", "o_proj", "experts"]}, train={"max_steps": 2},
    )  # fmt: skip
    for way in ("none", "selective"):
        _run(shardtune, config, way, way)
    assert _hash(tmp_path / "runs" / "none") == _hash(tmp_path / "runs" / "selective")
