"""The profiler on a GPU: event-timed phases against a synchronised measurement, NVML, and a plausible MFU."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from toys import toy_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from shardtune.observe import LLMStepProfiler
from shardtune.observe.chips import peak_tflops
from shardtune.observe.clocks import CudaClock
from shardtune.observe.gpu_meter import GpuMeter
from shardtune.observe.schema import problems

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 12


def trainer(folder: Path, callbacks: list[TrainerCallback]) -> SFTTrainer:
    toy_tokenizer(folder / "tokenizer")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=8000, max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(5, 8000, (64, 1024)).tolist()
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            max_length=1024, logging_steps=STEPS, report_to="none", save_strategy="no", disable_tqdm=True, bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
        callbacks=callbacks,
    )  # fmt: skip


def profiles(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "events-rank0.jsonl").read_text().splitlines()]
    assert [problem for record in records for problem in problems(record)] == []
    return [record for record in records if record["event"] == "profile"]


class Synchronised(TrainerCallback):
    """The same phases with a wait for the device before and after each."""

    def __init__(self) -> None:
        self.seconds: list[dict[str, float]] = []
        self.now: dict[str, float] = {}

    def clock(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        def before(*_: Any) -> None:
            self.began = self.clock()

        def after(*_: Any) -> None:
            ended = self.clock()
            self.now["forward"] = self.now.get("forward", 0.0) + ended - self.began

        model.register_forward_pre_hook(before, prepend=True)
        model.register_forward_hook(after)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = self.clock()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.now["optimizer"] = self.clock() - self.began

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_began = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.now["step"] = self.clock() - self.step_began
        self.seconds.append(self.now)
        self.now = {}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_phases_timed_with_events_agree_with_a_synchronised_measurement(tmp_path: Path) -> None:
    profiler, check = LLMStepProfiler(console=Console(file=io.StringIO())), Synchronised()
    trainer(tmp_path, [profiler, check]).train()
    found = profiles(tmp_path)[3:]
    assert len(found) == STEPS - 3
    # The step as it is measured here begins when its batches are there.
    measured = {
        "forward": median([profile["seconds"]["forward"] for profile in found]),
        "step": median([profile["seconds"]["step"] - profile["seconds"]["data"] for profile in found]),
    }
    expected = {name: median([seconds[name] for seconds in check.seconds[3:]]) for name in measured}
    assert measured == pytest.approx(expected, rel=0.1, abs=0.005)
    for profile in found:
        phases = {name: value for name, value in profile["seconds"].items() if name != "step"}
        assert phases["backward"] > 0 and sum(phases.values()) <= profile["seconds"]["step"] * 1.001


def test_ordinary_steps_never_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(CudaClock, "wait_for", lambda self, mark: (waits.append(1), mark.synchronize()))
    trainer(tmp_path, [LLMStepProfiler(console=Console(file=io.StringIO()))]).train()
    # At the very end, where the last step may still be under way.
    assert len(waits) <= 1 and len(profiles(tmp_path)) == STEPS


def test_speed_is_a_share_of_the_peak_and_memory_and_the_gpu_are_told(tmp_path: Path) -> None:
    trainer(tmp_path, [LLMStepProfiler(console=Console(file=io.StringIO()))]).train()
    for profile in profiles(tmp_path)[3:]:
        if peak_tflops(torch.cuda.get_device_name()) is not None:
            assert 0 < profile["mfu"] <= profile["hfu"] < 1
        assert 0 < profile["tflops"] <= profile["hardware_tflops"]
        memory = profile["memory"]
        assert 0 < memory["allocated"] <= memory["peak"] <= memory["reserved"] * 1.001
        assert profile["gpu"]["sm_clock_mhz"] > 0 and isinstance(profile["gpu"]["throttle"], list)


def test_nvml_finds_the_gpu_torch_uses() -> None:
    meter = GpuMeter(torch.cuda.current_device())
    meter.open()
    meter.close()
    assert meter.why_not is None
    assert {"power_watts", "temperature_c"} <= set(meter.latest)


def test_marks_are_used_again() -> None:
    clock = CudaClock()
    first, second = clock.mark(), clock.mark()
    clock.wait_for(second)
    assert clock.is_passed(first) and clock.seconds(first, second) >= 0
    clock.recycle([first, second])
    assert clock.mark() in (first, second)
