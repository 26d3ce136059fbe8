"""The loop: what is sent, who may follow it and decide, and that an interruption changes none of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from interrupted import final_weights, lines, run
from ranks import free_ports, on_ranks
from running import events
from safetensors.torch import load_file
from spoilt import not_a_number, spoilt
from toys import toy_config
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import shardtune


def test_no_part_of_it_is_a_trainer_of_transformers_or_trl() -> None:
    sources = Path(shardtune.__file__).parent.rglob("*.py")
    found = [
        path.name
        for path in sources
        if re.search(r"class \w+\(.*Trainer\)|\bSFTTrainer\)|import trl", path.read_text())
    ]
    assert found == []


def test_gradients_are_reduced_once_a_step_and_the_training_is_that_of_reducing_every_micro_batch(
    toy_model: Path, toy_data: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data, train={"max_steps": 4, "gradient_accumulation_steps": 3, "logging_steps": 1}
    )
    worker, out = Path(__file__).parent / "gradient_sync_worker.py", tmp_path / "counts.json"
    on_ranks(environment, worker, 2, config, json.dumps(free_ports(2)), out)
    counts = json.loads(out.read_text())
    assert counts["every"] == 3 * counts["once"] > 0
    once, every = (lines(tmp_path / "runs" / name) for name in ("once", "every"))
    assert list(once) == [1, 2, 3, 4]
    for step, line in once.items():
        assert line["loss"] == pytest.approx(every[step]["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(every[step]["grad_norm"], rel=1e-5)
    ours, theirs = (
        load_file(tmp_path / "runs" / name / "final/adapter_model.safetensors") for name in ("once", "every")
    )
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in ours)


class Counting(TrainerCallback, ExportableState):
    """Counts steps across an interruption, asks for a checkpoint after its third, and ends training after its fifth."""

    made: ClassVar[list[Counting]] = []

    def __init__(self) -> None:
        self.steps = 0
        self.seen: list[str] = []
        Counting.made.append(self)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert model.training and args.max_steps == state.max_steps == 8
        self.steps += 1
        control.should_save = self.steps == 3
        control.should_training_stop = self.steps == 5

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen += [
            f"{name}@{state.global_step}" for name in ("loss", "entropy", "mean_token_accuracy") if name in logs
        ]


def test_a_users_callback_decides_and_what_it_remembers_survives_an_interruption(
    toy_model: Path, toy_data: Path, tmp_path: Path
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data,
        train={"max_steps": 8, "logging_steps": 2, "callbacks": [f"{__name__}:Counting"]},
    )  # fmt: skip
    Counting.made.clear()
    assert run(config, run_id="whole") == 0
    assert run(config, run_id="cut", crash_at=4) is None
    assert run(config, run_id="cut") == 0
    whole, cut, resumed = (one for one in Counting.made if one.steps)
    assert (whole.steps, cut.steps, resumed.steps) == (5, 4, 5)
    assert whole.seen == [
        f"{name}@{step}" for step in (1, 2, 4, 5) for name in ("loss", "entropy", "mean_token_accuracy")
    ]
    runs = [tmp_path / "runs" / name for name in ("whole", "cut")]
    assert [event["step"] for event in events(runs[1], "resume")] == [3]
    assert lines(runs[0]) == lines(runs[1]) and list(lines(runs[0])) == [1, 2, 4, 5]
    assert final_weights(runs[0]) == final_weights(runs[1])


def test_early_stopping_counts_on_across_an_interruption_and_publishes_after_one(
    toy_model: Path, toy_data: Path, tmp_path: Path
) -> None:
    """A threshold that nothing reaches: the first evaluation is the best, the third without improvement ends it."""
    config = toy_config(
        tmp_path, toy_model, toy_data, data={"val_split": "validation"},
        train={"max_steps": 30, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 5,
               "early_stopping_patience": 3, "early_stopping_threshold": 9.0},
    )  # fmt: skip
    assert run(config, run_id="whole") == 0
    assert run(config, run_id="cut", crash_at=5) is None
    assert run(config, run_id="cut", crash_at=8) is None  # after the evaluation that ends it, before `final/`
    assert run(config, run_id="cut") == 0
    for name in ("whole", "cut"):
        folder = tmp_path / "runs" / name
        assert [event["step"] for event in events(folder, "run_end")] == [8]
        assert list(lines(folder)) == [1, 5, 8]
        (notice, *_) = [event for event in events(folder, "notice") if event["about"] == "early_stopping"]
        assert "did not improve by more than 9 in 3 evaluations" in notice["text"]
    assert final_weights(tmp_path / "runs/whole") == final_weights(tmp_path / "runs/cut")


class Following(TrainerCallback):
    """Notes what it is told, and by how many of its kind."""

    made: ClassVar[list[Following]] = []

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.begun = 0
        Following.made.append(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.begun += 1
        self.optimizer = optimizer

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        assert optimizer is self.optimizer
        self.steps.append(state.global_step)


def test_a_rollback_keeps_trackers_and_callbacks_and_gives_them_the_new_optimizer(
    toy_model: Path, toy_data: Path, tmp_path: Path
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data,
        train={"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "callbacks": [f"{__name__}:Following"]},
        guards={"non_finite": "rollback"},
    )  # fmt: skip
    Following.made.clear()
    with spoilt({4: not_a_number}):
        assert run(config, run_id="back") == 0
    (following,) = Following.made
    assert following.begun == 2 and following.steps == [1, 2, 3, 3, 4, 5, 6]
