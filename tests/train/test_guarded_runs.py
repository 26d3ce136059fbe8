"""Guards in real runs of one process: each is caused, and does what it was told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import final_weights, lines, run
from running import events
from spoilt import infinite_gradient, not_a_number, spoilt, thousandfold
from toys import toy_config

from shardtune.checkpoint.adapter import gather_adapter, read_adapter
from shardtune.data.order import StepOrder
from shardtune.report.history import RunHistory
from shardtune.train.guards.alarm import Alarm, GuardStop
from shardtune.train.guards.curve import Curve
from shardtune.train.guards.watch import Guards

ROWS, BATCH = 50, 4  # 13 steps an epoch, the last of 2 rows


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("guarded"), toy_model, toy_data,
        lora={"lora_dropout": 0.2},
        train={
            "max_steps": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "packing": False,
            "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant", "save_total_limit": None,
            "debug_freq": 5,
        },
        guards={"window": 8},
    )  # fmt: skip


def folder_of(config: Path, name: str) -> Path:
    return config.parent / "runs" / name


def losses(folder: Path) -> dict[int, float]:
    return {step: line["loss"] for step, line in lines(folder).items()}


def rows_of(step: int, micro: int | None = None) -> list[str]:
    """From torch alone: the first epoch's permutation, cut into steps of 4 and micro-batches of 2."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(42)).tolist()
    rows = order[(step - 1) * BATCH : step * BATCH]
    return [f"train:{row}" for row in (rows if micro is None else rows[2 * micro : 2 * micro + 2])]


@contextmanager
def watching() -> Iterator[list[Guards]]:
    """The guards of the runs inside the block."""
    seen: list[Guards] = []
    attach = Guards.attach
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guards, "attach", lambda self, loop: (seen.append(self), attach(self, loop))[1])
        yield seen


@pytest.fixture(scope="module")
def without_the_rows_of_step_11(config: Path) -> Path:
    """A run whose data never had these rows: the same order without them."""
    permutation = StepOrder._permutation

    def shorter(self: StepOrder, epoch: int) -> list[int]:
        order = permutation(self, epoch)
        return order[:40] + order[44:] if self.seed is not None and epoch == 0 else order

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepOrder, "_permutation", shorter)
        assert run(config, "train.max_steps=11", run_id="without") == 0
    return folder_of(config, "without")


@pytest.fixture(scope="module")
def rolled_back(config: Path) -> Path:
    with spoilt({11: thousandfold}):
        assert run(config, "guards.loss_spike=rollback", run_id="back") == 0
    return folder_of(config, "back")


def test_after_a_rollback_the_curve_is_that_of_a_run_whose_data_never_had_the_rows(
    rolled_back: Path, without_the_rows_of_step_11: Path
) -> None:
    """With dropout and at a constant rate: bit for bit, a step later."""
    (event,) = events(rolled_back, "guard")
    assert (event["guard"], event["action"], event["step"], event["to_step"]) == ("loss_spike", "rollback", 11, 9)
    assert event["rows"] == rows_of(11) and event["value"] > event["limit"]
    mine, never = losses(rolled_back), losses(without_the_rows_of_step_11)
    assert list(mine) == [*range(1, 11), *range(12, 17)]  # step 11 was not taken: there is no line of it
    assert [mine[step] for step in (*range(1, 11), 12)] == [never[step] for step in range(1, 12)]
    tokens = [lines(folder)[step]["tokens"] for folder, step in ((rolled_back, 12), (without_the_rows_of_step_11, 11))]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("ending", ["stop_at", "crash_at"])
def test_a_run_that_rolled_back_still_resumes_to_the_same_bits(config: Path, rolled_back: Path, ending: str) -> None:
    """After the rollback and a checkpoint later, which knows what is passed over; or right after it, which does not."""
    name = f"back-{ending}"
    with spoilt({11: thousandfold}):
        code = run(config, "guards.loss_spike=rollback", run_id=name, **{ending: 13 if ending == "stop_at" else 10})
        assert code == (75 if ending == "stop_at" else None)
        assert run(config, "guards.loss_spike=rollback", run_id=name) == 0
    folder = folder_of(config, name)
    assert losses(folder) == losses(rolled_back)
    assert final_weights(folder) == final_weights(rolled_back)
    kept = [
        json.loads((one / "checkpoints/step-000015/trainer.json").read_text())["guards"]
        for one in (folder, rolled_back)
    ]
    for one in kept:
        one["health"].pop("slow")  # of clocks
    assert kept[0] == kept[1]
    assert kept[0]["passed_over"] == [11] and kept[0]["rollbacks"] == 1 and kept[0]["curve"]["accepted"] == 14


def test_a_loss_that_is_no_number_stops_before_the_optimizer_uses_it(config: Path) -> None:
    with watching() as seen, spoilt({5: not_a_number}, micro=1):
        with pytest.raises(GuardStop, match="Loss is not finite at step 5: NaN on rank 0") as stopped:
            run(config, "train.save_steps=1", run_id="nan")
        held = gather_adapter(seen[0].loop.model)
    folder = folder_of(config, "nan")
    (event,) = events(folder, "guard")
    assert (event["action"], event["ranks"], event["rows"]) == ("stop", [0], rows_of(5, micro=1))
    assert rows_of(5, micro=1)[0] in stopped.value.why and "train.learning_rate" in stopped.value.fix
    history = RunHistory(folder)
    history.update()
    assert len(history.marks) > len(history.reported_marks()), "the error that follows is in the events, too"
    assert [mark.kind for mark in history.reported_marks() if mark.kind in ("guard", "failure")] == ["guard"]
    before = read_adapter(folder / "checkpoints" / "step-000004")
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
    assert not (folder / "final").exists()


def test_a_gradient_that_is_no_number_never_reaches_the_weights_where_it_is_not_waited_for(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the host hears of it a step later, and before anything is saved."""
    init = Guards.__init__

    def never_waits(self: Guards, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.waits = False

    monkeypatch.setattr(Guards, "__init__", never_waits)
    for name, overrides, last in (("later", ("train.save_steps=20", "train.logging_steps=20"), 4), ("save", (), 3)):
        spoil = {4 if name == "later" else 3: infinite_gradient}
        with (
            watching() as seen,
            spoilt(spoil),
            pytest.raises(GuardStop, match=r"gradient norm is (NaN|infinite) at step \d"),
        ):
            run(config, *overrides, run_id=name)
        (guards,) = seen
        assert guards.loop.state.global_step == last  # of which the optimizer took the last with zeros
        assert all(torch.isfinite(tensor).all() for tensor in gather_adapter(guards.loop.model).values())
        folder = folder_of(config, name)
        (event,) = events(folder, "guard")
        assert event["step"] == next(iter(spoil)) and "ranks" not in event and event["rows"] == rows_of(event["step"])
        assert not list((folder / "checkpoints").glob("step-*"))


def test_a_skipped_step_leaves_no_trace_but_its_event(config: Path) -> None:
    """A skipped step and one that a rollback passed over: the same weights, without dropout (which draws numbers)."""
    common = ("lora.lora_dropout=0", "train.max_steps=12", "train.logging_steps=2")
    with spoilt({11: not_a_number}):
        assert run(config, *common, "guards.non_finite=skip-step", run_id="skip") == 0
        assert run(config, *common, "guards.non_finite=rollback", run_id="skip-back") == 0
    skipped, back = folder_of(config, "skip"), folder_of(config, "skip-back")
    (event,) = events(skipped, "guard")
    assert (event["guard"], event["action"], event["step"]) == ("non_finite", "skip-step", 11)
    assert final_weights(skipped) == final_weights(back)
    assert lines(skipped) == lines(back)
    assert json.loads((skipped / "checkpoints/step-000012/trainer.json").read_text())["guards"]["skips"] == 1


def test_too_many_skips_in_a_row_and_too_many_rollbacks_stop_the_run(config: Path) -> None:
    bad = dict.fromkeys((4, 5, 6), not_a_number)
    with spoilt(bad), pytest.raises(GuardStop, match="3 steps in a row would be skipped"):
        run(config, "guards.non_finite=skip-step", "guards.max_skips=2", run_id="skips")
    assert [e["action"] for e in events(folder_of(config, "skips"), "guard")] == ["skip-step", "skip-step", "stop"]
    with spoilt(bad), pytest.raises(GuardStop, match="rolled back 2 times"):
        run(config, "guards.non_finite=rollback", "guards.max_rollbacks=2", run_id="backs")
    told = events(folder_of(config, "backs"), "guard")
    assert [(e["action"], e["step"]) for e in told] == [("rollback", 4), ("rollback", 5), ("stop", 6)]


def test_a_rollback_without_a_checkpoint_from_before_stops_and_says_so(config: Path) -> None:
    with spoilt({2: not_a_number}), pytest.raises(GuardStop, match="no earlier checkpoint") as stopped:
        run(config, "guards.non_finite=rollback", run_id="nowhere")
    assert "train.save_steps" in stopped.value.fix


def test_checkpoints_from_inside_the_trouble_are_set_aside(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trend, told = Curve.trend, []

    def diverges(self: Curve, step: int) -> Alarm | None:
        if step == 7 and not told:
            told.append(step)
            return Alarm("divergence", 7, "The loss is diverging.", since=5)
        return trend(self, step)

    monkeypatch.setattr(Curve, "trend", diverges)
    common = ("guards.divergence=rollback", "train.save_steps=2", "train.max_steps=8")
    assert run(config, *common, run_id="aside") == 0
    folder = folder_of(config, "aside")
    (event,) = events(folder, "guard")
    assert event["to_step"] == 4
    assert list(losses(folder)) == [1, 2, 3, 4, 5, 6, 8]  # 5 to 7 once, and never again
    names = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert [name for name in names if name.startswith("step-")] == [f"step-{n:06d}" for n in (2, 4, 6, 8)]
    assert [name[:23] for name in names if not name.startswith("step-")] == ["passed-over-step-000006"]


def test_an_ordinary_run_raises_no_alarm(config: Path) -> None:
    ordinary = ("guards.window=50", "train.max_steps=70", "train.lr_scheduler_type=cosine", "train.save_strategy=no")
    assert run(config, *ordinary, run_id="ordinary") == 0
    assert events(folder_of(config, "ordinary"), "guard") == []


def test_a_loss_that_rises_and_stays_up_stops_the_run_where_asked_to(config: Path) -> None:
    lone = ("guards.divergence=stop", "guards.loss_spike=off", "guards.grad_norm_spike=off", "train.save_strategy=no")
    with spoilt(dict.fromkeys(range(10, 17), thousandfold)), pytest.raises(GuardStop, match="The loss is diverging"):
        run(config, *lone, run_id="diverging")
    (event,) = events(folder_of(config, "diverging"), "guard")
    assert (event["guard"], event["action"]) == ("divergence", "stop") and event["value"] > 1000
    assert 10 < event["step"] <= 16


def test_a_run_that_learns_nothing_is_told_so(config: Path) -> None:
    idle = ("train.learning_rate=1e-6", "guards.flat_loss_steps=8", "train.max_steps=48", "train.save_strategy=no")
    assert run(config, *idle, run_id="flat") == 0
    assert {event["guard"] for event in events(folder_of(config, "flat"), "guard")} == {"flat_loss"}
