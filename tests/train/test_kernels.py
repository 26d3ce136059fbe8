"""The fast path of a run and its eager twin: the same curve, and the run says which code it took."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import run
from running import events
from safetensors.torch import load_file
from toys import WORDS, toy_config, toy_llama, toy_text_config

from shardtune.model.families.registry import family_of
from shardtune.model.model_outline import outline_of
from shardtune.plan.gather import loss_obstacle
from shardtune.terminal import VERBOSE_VARIABLE

RUNS = {
    "eager": ["train.kernels=eager"],
    "fast": [],
    "lora-only": ["train.fused_loss=false"],
    "loss-only": ["train.fused_lora=false"],
    "compiled": ["train.compile=true"],
    "eager-unpacked": ["train.kernels=eager", "train.packing=false"],
    "unpacked": ["train.packing=false"],
}


@pytest.fixture(scope="module")
def runs(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kernels")
    model = toy_llama(folder / "model")
    config = toy_config(folder, model, toy_data, train={"max_steps": 8, "logging_steps": 1})
    for name, overrides in RUNS.items():
        with redirect_stdout(StringIO()) as said, pytest.MonkeyPatch.context() as patch:
            patch.setenv(VERBOSE_VARIABLE, "1")
            assert run(config, *overrides, run_id=name) == 0
        (folder / "runs" / name / "stdout").write_text(said.getvalue())
    return {name: folder / "runs" / name for name in RUNS}


@pytest.mark.slow
@pytest.mark.parametrize("other", [name for name in RUNS if not name.startswith("eager")])
def test_every_kernel_gives_the_curve_of_its_twin(runs: dict[str, Path], other: str) -> None:
    twin = runs["eager-unpacked" if other == "unpacked" else "eager"]
    for number in ("loss", "grad_norm", "learning_rate", "tokens"):
        meant = [event[number] for event in events(twin, "step")]
        assert len(meant) == 8 and [event[number] for event in events(runs[other], "step")] == pytest.approx(
            meant, rel=1e-5
        )
    own = load_file(runs[other] / "final" / "adapter_model.safetensors")
    for name, tensor in load_file(twin / "final" / "adapter_model.safetensors").items():
        assert torch.allclose(own[name], tensor, rtol=1e-3, atol=1e-5), name


@pytest.mark.slow
def test_the_saved_config_tells_which_code_ran_and_why(runs: dict[str, Path]) -> None:
    fast, eager = ((runs[name] / "config.yaml").read_text() for name in ("fast", "eager"))
    assert "fused_lora: true" in fast and "fused_loss: true" in fast and "compile: false" in fast
    assert "compiling pays off only on a GPU" in fast
    assert "fused_lora: false" in eager and "train.kernels is eager" in eager


@pytest.mark.slow
def test_the_run_says_which_code_it_takes(runs: dict[str, Path]) -> None:
    def said(name: str) -> str:
        lines = (runs[name] / "stdout").read_text().splitlines()
        return next(line for line in lines if line.startswith("kernels")).removeprefix("kernels").strip()

    assert said("fast") == (
        "fused: LoRA on 4 layers, loss; eager: layers (compiling pays off only on a GPU in half precision); attention: sdpa"
    )
    why = "train.kernels is eager"
    assert said("eager") == f"eager: LoRA ({why}), loss ({why}), layers ({why}); attention: sdpa"
    assert said("loss-only").startswith("fused: loss; eager: LoRA (train.fused_lora is false), ")
    assert said("compiled") == "fused: LoRA on 4 layers, loss, compiled layers; attention: sdpa"


def compiled_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], *overrides: str
) -> list[dict[str, Any]]:
    """The profiles of eight steps over rows of so many words, in sequences of 31 tokens."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    rows = [{"text": " ".join(WORDS[n % 60] for n in range(length))} for length in lengths]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"prompt_template": None, "max_length": 31}
    config = toy_config(folder, toy_llama(folder / "model"), folder / "rows.jsonl", data=data, train={"max_steps": 8})
    assert run(config, "train.compile=true", *overrides, run_id="one") == 0
    return events(folder / "runs" / "one", "profile")


@pytest.mark.parametrize(
    ("packing", "lengths", "said"),
    [
        ("true", [18, 10, 13, 9, 5, 8] * 4, "packing   24 rows in "),
        ("false", [30, 29, 28, 30, 29], "padded to 31: layers are compiled for one shape"),
    ],
    ids=["packed", "nearly full"],
)
def test_layers_are_compiled_in_the_first_step_and_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    packing: str, lengths: list[int], said: str,
) -> None:  # fmt: skip
    """Whatever rows a batch has, and in the last one of an epoch, which has fewer.

    Two documents to a row at least: where a batch has none to keep apart, transformers leaves the mask out, which is
    another way through the layer.
    """
    profiles = compiled_run(tmp_path, monkeypatch, lengths, f"train.packing={packing}")
    assert said in capsys.readouterr().out
    assert len({profile["tokens"]["real"] for profile in profiles}) > 2  # other rows, and fewer
    assert {profile["tokens"]["real"] + profile["tokens"]["padded"] for profile in profiles} == {2 * 31}
    compiled = [profile.get("compiled", 0) for profile in profiles]
    assert compiled[0] > 0 and compiled[1:] == [0] * 7


def test_where_there_is_one_batch_no_rows_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = compiled_run(tmp_path, monkeypatch, [18, 10], "train.packing=true")
    assert {profile["tokens"]["real"] + profile["tokens"]["padded"] for profile in profiles} == {31}
    assert [profile.get("compiled", 0) > 0 for profile in profiles] == [True] + [False] * 7


def test_lora_on_weights_held_in_fp8_takes_one_operator_too(
    toy_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERBOSE_VARIABLE, "1")
    config = toy_config(tmp_path, toy_llama(tmp_path / "model"), toy_data, train={"max_steps": 1})
    assert run(config, "model.base_precision=fp8") == 0
    assert "fused: LoRA on 4 layers, loss;" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_a_gpu_does_not_load_the_compiler() -> None:
    code = "import sys, shardtune.train.run; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_model_with_something_between_head_and_loss_keeps_its_own_loss(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    capped = AutoModelForCausalLM.from_config(toy_text_config("gemma3_text", final_logit_softcapping=30.0))
    assert loss_obstacle(outline_of(plain, family_of(plain))) is None
    assert "final_logit_softcapping" in str(loss_obstacle(outline_of(capped, family_of(capped))))
