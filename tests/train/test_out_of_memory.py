"""A run whose device memory runs out, in every phase: an error with an answer, an event, and a code of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import run
from running import events
from toys import toy_config

from shardtune.checkpoint.snapshot import Snapshot
from shardtune.run.exit_codes import OUT_OF_MEMORY
from shardtune.train import run as run_module
from shardtune.train import validation
from shardtune.train.loop import TrainingLoop
from shardtune.train.memory.allocator import Allocator
from shardtune.train.memory.failure import OutOfMemory
from shardtune.train.optimizers import OPTIMIZERS
from shardtune.train.saving import CheckpointSaver


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 has no more.")


class _NoMemoryBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return no_memory()


@contextmanager
def failing_in(phase: str) -> Iterator[None]:
    """The second allocation of step 2 (or what a phase needs) fails, as torch's allocator fails."""
    train_step, normalise = TrainingLoop.train_step, TrainingLoop.normalise

    def fail_in_step(self: TrainingLoop, batches: Any) -> None:
        if phase in ("forward", "loss") and self.state.global_step == 1:
            base = self.model.get_base_model()
            where = base.model.layers[1].mlp if phase == "forward" else base.model
            where.register_forward_hook(no_memory, always_call=False)
        train_step(self, batches)

    def fail_in_backward(self: TrainingLoop, *args: Any) -> torch.Tensor:
        loss = normalise(self, *args)
        return _NoMemoryBackward.apply(loss) if phase == "backward" and self.state.global_step == 1 else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "train_step", fail_in_step)
        patch.setattr(TrainingLoop, "normalise", fail_in_backward)
        if phase == "evaluation":
            patch.setattr(validation, "to_device", no_memory)
        if phase == "optimizer":
            patch.setattr(OPTIMIZERS["adamw_torch"], "step", no_memory)
        if phase == "saving":
            patch.setattr(CheckpointSaver, "save", no_memory)
        if phase == "loading":
            patch.setattr(run_module, "load_sharded_weights", no_memory)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("memory"), toy_model, toy_data,
        data={"val_split": "validation"},
        train={"max_steps": 3, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "packing": False},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("loading", "while the model was loaded"), ("forward", "in the forward pass of step 2"),
        ("loss", "in the loss of step 2"), ("backward", "in the backward pass of step 2"),
        ("optimizer", "in the optimizer of step 1"), ("evaluation", "in an evaluation"),
        ("saving", "while a checkpoint was saved"),
    ],
)  # fmt: skip
def test_the_phase_is_named_and_what_was_held_is_counted(config: Path, phase: str, words: str) -> None:
    with failing_in(phase), pytest.raises(OutOfMemory) as ended:
        run(config, run_id=phase)
    assert ended.value.exit_code == OUT_OF_MEMORY == 71
    assert words in ended.value.what and "failed to allocate 64 KiB" in ended.value.what
    (event,) = events(config.parent / "runs" / phase, "out_of_memory")
    assert (event["phase"], event["wanted"]) == (phase, 64 << 10)
    held = event["held"]
    adapters = 2 * 2 * (4 * 32 + 4 * 32) * 4 - 2 * 4 * 16 * 4  # q: 32 → 32, v: 32 → 16, in 2 layers, rank 4
    if phase != "loading":
        assert held["adapters"] == adapters
        assert held["weights"] > 80_000
    assert held["gradients"] == (adapters if phase == "optimizer" else 0)
    assert (held["optimizer"] > 2 * adapters) == (phase in ("forward", "loss", "backward", "evaluation", "saving"))
    # One process gathers nothing of the frozen weights; of the adapters there is a copy, until backward is through.
    assert (held["gathered"] > 0) == (phase in ("forward", "loss", "backward"))
    settings = [one["setting"] for one in event["advice"]]
    assert ("train.per_device_train_batch_size" in settings) == (phase in ("forward", "loss", "backward"))
    assert ("train.per_device_eval_batch_size" in settings) == (phase == "evaluation")


def test_what_the_allocator_has_given_out_is_told_apart_and_adds_up(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with 10 MiB: 1 MiB nobody knows of, 5 MiB in the layers, 2 MiB in the loss, where it fails."""
    given, loop = [1 << 20], []
    from shardtune.train.memory.held import known_parts

    def allocated() -> int:
        known = known_parts(loop[0].model, loop[0].ledger.optimizer, torch.device("cpu")) if loop else {}
        return given[0] + sum(known.values())

    device = Allocator(torch.device("cpu"), allocated, lambda: 10 << 20, lambda: 30 << 10)
    monkeypatch.setattr(run_module, "allocator_of", lambda _: device)
    step = TrainingLoop.train_step

    def grow(amount: int) -> Any:
        def hook(*_: Any) -> None:
            given[0] += amount

        return hook

    def train_step(self: TrainingLoop, batches: Any) -> None:
        loop[:] = [self]
        given[0] = 1 << 20
        base = self.model.get_base_model()
        if self.state.global_step == 1:
            base.model.layers[1].mlp.register_forward_hook(grow(5 << 20))
            base.model.register_forward_hook(grow(2 << 20))
            base.model.register_forward_hook(no_memory)
        step(self, batches)

    monkeypatch.setattr(TrainingLoop, "train_step", train_step)
    with pytest.raises(OutOfMemory) as ended:
        run(config, run_id="device")
    (event,) = events(config.parent / "runs" / "device", "out_of_memory")
    held = event["held"]
    assert (held["other"], held["activations"], held["loss"]) == (1 << 20, 5 << 20, 2 << 20)
    assert sum(held.values()) == allocated()
    assert (event["capacity"], event["free"]) == (10 << 20, 30 << 10)
    assert "30 KiB of 10 MiB were free" in ended.value.what
    assert ended.value.why.startswith("In use: activations 5 MiB, loss and logits 2 MiB, other 1 MiB, ")
    assert "the first change alone is enough" in ended.value.fix
    assert (event["advice"][0]["value"], event["advice"][0]["frees"]) == ("1", ((5 << 20) + (2 << 20) + 65_536) // 2)


def test_another_error_passes_through_as_it_is(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Snapshot) -> int:
        raise ZeroDivisionError("not about memory")

    monkeypatch.setattr(Snapshot, "size", property(broken))
    with pytest.raises(ZeroDivisionError):
        run(config, run_id="other")
    assert events(config.parent / "runs" / "other", "out_of_memory") == []
