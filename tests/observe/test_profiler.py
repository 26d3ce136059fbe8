"""The profiler with TRL alone, as anybody would use it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from torch.utils.data import dataloader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from shardtune.observe import LLMStepProfiler
from shardtune.observe.clocks import HostClock
from shardtune.observe.schema import problems


def rows(count: int = 32) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 20, (count,), generator=generator).tolist()
    ids = [torch.randint(5, 60, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": ids})


def trainer(folder: Path, model: Path, callbacks: list[TrainerCallback], **changes: Any) -> SFTTrainer:
    data = changes.pop("data", None) or rows()
    settings = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no",
        "gradient_checkpointing": False, "max_length": 64, "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=SFTConfig(**{**settings, **changes}),
        train_dataset=data,
        eval_dataset=rows(8) if changes.get("eval_strategy") else None,
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=callbacks,
    )


class Time:
    """A clock that stands still unless a test moves it: no machine is too slow for it."""

    def __init__(self) -> None:
        self.now = 0.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    moved = Time()
    monkeypatch.setattr(HostClock, "mark", lambda _: moved.now)
    return moved


def events(folder: Path, kind: str | None = None) -> list[dict]:
    found = map(json.loads, (folder / "events-rank0.jsonl").read_text().splitlines())
    return [event for event in found if kind in (None, event["event"])]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def said(profiler: LLMStepProfiler) -> str:
    assert profiler.console is not None
    file = profiler.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_line_does_not_stick_to_the_bar_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=40, initial=20):
        LLMStepProfiler(console=Console(width=120)).print_line("profile 20")
    before = terminal.getvalue().partition("profile 20\n")[0]
    assert "20/40" in before and re.split(r"[\r\n]", before)[-1] == ""


def test_alone_with_trl_it_writes_every_step_a_line_now_and_then_and_a_summary(tmp_path: Path, toy_model: Path) -> None:
    profiler = LLMStepProfiler(
        debug_freq=2, seq_len=64, output_dir=tmp_path / "run", report_meta={"team": "a"}, script_name="sft.py",
        console=quiet(),
    )  # fmt: skip
    trainer(tmp_path / "trainer", toy_model, [profiler]).train()
    all_events = events(tmp_path / "run")
    assert [problem for event in all_events for problem in problems(event)] == []
    [start] = events(tmp_path / "run", "run_start")
    assert (start["meta"], start["script"], start["seq_len"]) == ({"team": "a"}, "sft.py", 64)
    profiles = events(tmp_path / "run", "profile")
    assert [profile["step"] for profile in profiles] == [1, 2, 3, 4]
    for profile in profiles:
        seconds = dict(profile["seconds"])
        assert set(seconds) == {"step", "data", "forward", "backward", "optimizer"}
        step = seconds.pop("step")
        assert all(value > 0 for value in seconds.values()) and sum(seconds.values()) < step
        assert profile["tflops"] > 0 and "mfu" not in profile and "memory" not in profile and "gpu" not in profile
        assert profile["host"]["rss"] > 1e6
        assert profile["tokens_per_second"] == pytest.approx(profile["tokens"]["real"] / step, rel=0.01)
    lines = [line for line in said(profiler).splitlines() if line.startswith("profile ") and "step" in line]
    assert [line.split()[1] for line in lines] == ["2", "4"]
    assert len(events(tmp_path / "run", "step")) == 4 and events(tmp_path / "run", "run_end")[0]["status"] == "done"
    summary = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert summary["steps"] == 4 and summary["medians"]["seconds.step"] > 0


def test_tokens_are_those_the_model_saw(tmp_path: Path, toy_model: Path) -> None:
    """accelerate's loader is a batch ahead of the model; what it has fetched belongs to the next step."""

    class Seen(TrainerCallback):
        def __init__(self) -> None:
            self.computed: list[int] = []
            self.real: list[int] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.register_forward_pre_hook(self._look, with_kwargs=True)

        def _look(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
            self.computed.append(kwargs["input_ids"].numel())
            self.real.append(int(kwargs["attention_mask"].sum()))

    seen = Seen()
    trainer(tmp_path, toy_model, [LLMStepProfiler(console=quiet()), seen], max_steps=5).train()
    tokens = [profile["tokens"] for profile in events(tmp_path, "profile")]
    real = [sum(pair) for pair in zip(seen.real[::2], seen.real[1::2], strict=True)]
    computed = [sum(pair) for pair in zip(seen.computed[::2], seen.computed[1::2], strict=True)]
    assert [step["real"] for step in tokens] == real
    assert [step["real"] + step["padded"] for step in tokens] == computed


def test_a_step_that_compiles_says_so_and_a_late_one_is_remarked(tmp_path: Path, toy_model: Path) -> None:
    torch._dynamo.reset()
    lengths = [16] * 5 + [9] * 3
    data = Dataset.from_dict({"input_ids": [list(range(5, 5 + length)) for length in lengths]})
    profiler = LLMStepProfiler(console=quiet())
    run = trainer(
        tmp_path, toy_model, [profiler], data=data, max_steps=8, per_device_train_batch_size=1,
        gradient_accumulation_steps=1, train_sampling_strategy="sequential",
    )  # fmt: skip
    for layer in run.model.base_model.model.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend="eager", dynamic=False)
    run.train()
    compiled = [profile.get("compiled", 0) for profile in events(tmp_path, "profile")]
    assert [count > 0 for count in compiled] == [True] + [False] * 4 + [True] + [False] * 2
    [notice] = [event["text"] for event in events(tmp_path, "notice") if "compiled" in event["text"]]
    assert notice.startswith("step 6 was slow because layers were recompiled") and "step 6 was slow" in said(profiler)
    medians = json.loads((tmp_path / "profile.json").read_text())["medians"]
    assert "seconds.step" in medians and "compiled" not in medians


def test_waiting_for_data_is_told_apart_from_computing(tmp_path: Path, toy_model: Path, time: Time) -> None:
    run = trainer(tmp_path, toy_model, [LLMStepProfiler(console=quiet())], max_steps=3)
    loader_of = run.get_train_dataloader

    def slow_loader() -> Any:
        loader = loader_of()
        collate = loader.base_dataloader.collate_fn

        def wait_and_collate(examples: list) -> Any:
            time.passes(5)
            return collate(examples)

        loader.base_dataloader.collate_fn = wait_and_collate
        return loader

    run.get_train_dataloader = slow_loader
    run.train()
    data = [profile["seconds"]["data"] for profile in events(tmp_path, "profile")]
    assert data == [15, 10, 10]  # two micro-batches a step, and the loader stays one ahead
    assert [profile["seconds"]["step"] for profile in events(tmp_path, "profile")] == data


def test_evaluating_and_saving_belong_to_no_step(tmp_path: Path, toy_model: Path, time: Time) -> None:
    class Dawdle(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.passes(1)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
            time.passes(0.5 if "loss" in (logs or {}) else 0)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.passes(100)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.passes(1000)

    def steps(name: str, **changes: Any) -> list[dict]:
        folder = tmp_path / name
        trainer(folder, toy_model, [Dawdle(), LLMStepProfiler(console=quiet())], **changes).train()
        return events(folder, "profile")

    # What is done between steps, such as logging, belongs to the step after it.
    plain = steps("plain")
    assert [profile["seconds"]["step"] for profile in plain] == [1, 1.5, 1.5, 1.5]
    saving = {"save_strategy": "steps", "save_steps": 2}
    both = steps("both", eval_strategy="steps", eval_steps=1, **saving)
    assert [profile["seconds"]["step"] for profile in both] == [1, 1, 1, 1]
    saved = steps("saved", **saving)
    assert [profile["seconds"]["step"] for profile in saved] == [1, 1.5, 1, 1.5]
    assert [profile["tokens"] for profile in plain] == [profile["tokens"] for profile in both]


def test_slow_passes_and_a_slow_optimizer_are_found_where_they_are(tmp_path: Path, toy_model: Path, time: Time) -> None:
    run = trainer(tmp_path, toy_model, [LLMStepProfiler(console=quiet())], max_steps=3)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.passes(3)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.passes(7)
            return grad

    layer = run.model.get_base_model().model.layers[1]
    layer.register_forward_hook(lambda _, __, out: Slow.apply(out) if out.requires_grad else out)
    clip = run._clip_grad_norm

    def slow_clip(model: Any) -> Any:
        time.passes(11)
        return clip(model)

    run._clip_grad_norm = slow_clip
    run.create_optimizer()
    step = run.optimizer.step

    def slow_step(*args: Any, **kwargs: Any) -> Any:
        time.passes(13)
        return step(*args, **kwargs)

    run.optimizer.step = slow_step
    run.train()
    for profile in events(tmp_path, "profile"):
        assert profile["seconds"] == {"step": 44, "data": 0, "forward": 6, "backward": 14, "optimizer": 24}


def test_a_device_that_lags_behind_is_read_when_it_gets_there_and_waited_for_at_the_end_alone(
    tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_at: list[tuple[int, int]] = []
    state = {"step": 0, "waits": 0}

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
            state["step"] = trainer_state.global_step + 1

    def wait_for(*_: object) -> None:
        state["waits"] += 1

    # The device passes the end of a step while the host is two steps further on.
    monkeypatch.setattr(HostClock, "is_passed", lambda *_: state["waits"] > 0 or len(written_at) + 2 < state["step"])
    monkeypatch.setattr(HostClock, "wait_for", wait_for)
    profiler = LLMStepProfiler(debug_freq=2, console=quiet())
    profiler.listeners.append(lambda profile: written_at.append((profile["step"], state["step"])))
    trainer(tmp_path, toy_model, [Steps(), profiler], max_steps=6).train()
    assert written_at == [(1, 3), (2, 4), (3, 5), (4, 6), (5, 6), (6, 6)]
    assert state["waits"] == 1
    assert [profile["step"] for profile in events(tmp_path, "profile")] == [1, 2, 3, 4, 5, 6]
    assert [line.split()[1] for line in said(profiler).splitlines() if "/step" in line] == ["2", "4", "6"]


def test_trackers_get_the_numbers_once_it_stands_before_them(tmp_path: Path, toy_model: Path) -> None:
    class Tracker(TrainerCallback):
        def __init__(self) -> None:
            self.logs: list[dict] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any) -> None:
            self.logs.append(dict(logs or {}))

    tracker, profiler, last = Tracker(), LLMStepProfiler(console=quiet()), Tracker()
    trainer(tmp_path, toy_model, [LLMStepProfiler(console=quiet()), last], max_steps=1).train()
    assert last.logs and not any("profile/" in name for logs in last.logs for name in logs)  # not asked for
    run = trainer(tmp_path, toy_model, [tracker, profiler])
    profiler.attach(run)
    run.train()
    with_loss = [logs for logs in tracker.logs if "loss" in logs]
    assert len(with_loss) == 4
    assert all(logs["profile/seconds/step"] > 0 and logs["profile/tflops"] > 0 for logs in with_loss)
    assert all(not name.startswith("profile/") for entry in run.state.log_history for name in entry)


def test_a_tracker_that_will_get_nothing_is_told_of(tmp_path: Path, toy_model: Path) -> None:
    profiler = LLMStepProfiler(console=quiet())
    trainer(tmp_path, toy_model, [profiler], report_to="tensorboard", max_steps=1).train()
    assert "tensorboard will not get the profiler's numbers: call profiler.attach(trainer)" in said(profiler)
    assert events(tmp_path, "notice")[0]["about"] == "profiler"


def test_tensorboard_reads_them_back(tmp_path: Path, toy_model: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    profiler = LLMStepProfiler(console=quiet())
    run = trainer(tmp_path, toy_model, [profiler], report_to="tensorboard")
    profiler.attach(run)
    run.train()
    assert "will not get" not in said(profiler)
    [file] = tmp_path.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(file.parent))
    board.Reload()
    steps = {scalar.step: scalar.value for scalar in board.Scalars("train/profile/seconds/step")}
    written = {profile["step"]: profile["seconds"]["step"] for profile in events(tmp_path, "profile")}
    assert steps == pytest.approx(written) and set(steps) == {1, 2, 3, 4}
    assert "train/profile/tflops" in board.Tags()["scalars"]


def test_a_run_that_goes_on_counts_on_and_skips_what_was_seen(tmp_path: Path, toy_model: Path) -> None:
    trainer(tmp_path / "a", toy_model, [], max_steps=2, save_strategy="steps", save_steps=2).train()
    profiler = LLMStepProfiler(output_dir=tmp_path / "b", console=quiet())
    again = trainer(tmp_path / "a", toy_model, [profiler], max_steps=4, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    profiles = events(tmp_path / "b", "profile")
    assert [profile["step"] for profile in profiles] == [3, 4]
    assert all("data" in profile["seconds"] and profile["tokens"]["real"] > 0 for profile in profiles)


def test_nothing_is_left_on_the_model_or_in_torch_when_it_is_over(tmp_path: Path, toy_model: Path) -> None:
    def hooks(model: Any) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    hand_out = dataloader._BaseDataLoaderIter.__next__
    profiler = LLMStepProfiler(console=quiet())
    run = trainer(tmp_path, toy_model, [profiler], max_steps=1)
    before = hooks(run.model)
    run.train()
    assert hooks(run.model) == before and dataloader._BaseDataLoaderIter.__next__ is hand_out


def test_training_is_the_same_with_and_without_it(tmp_path: Path, toy_model: Path) -> None:
    losses = []
    for name, callbacks in (("with", [LLMStepProfiler(console=quiet())]), ("without", [])):
        run = trainer(tmp_path / name, toy_model, callbacks, gradient_checkpointing=True)  # type: ignore[arg-type]
        run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]


def test_a_torch_without_the_loaders_iterator_gives_no_data_time_and_says_so(
    tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = LLMStepProfiler(console=quiet())
    run = trainer(tmp_path, toy_model, [profiler], max_steps=1)
    monkeypatch.setattr("shardtune.observe.dataloader_tap._iterator_class", lambda: None)
    run.train()
    [profile] = events(tmp_path, "profile")
    assert "data" not in profile["seconds"] and "tokens" not in profile and "tflops" not in profile
    assert profile["seconds"]["forward"] > 0
    assert said(profiler).count("data time and tokens are not measured") == 1


def test_it_can_be_imported_without_torch() -> None:
    code = "import sys, shardtune.observe, shardtune.observe.events, shardtune.observe.schema; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
