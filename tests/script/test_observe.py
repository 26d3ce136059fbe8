"""`from shardtune import observe`: steps, metrics, phases, checkpoints and stop requests of a script, as events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import events

from shardtune import observe
from shardtune.observe import api
from shardtune.observe.events import EventLog
from shardtune.observe.schema import problems
from shardtune.observe.session import Session


class Follower:
    """Stands for the rank's process."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.stop = False

    def enter(self, doing: str, step: int) -> None:
        self.said.append((doing, step))

    def leave(self, doing: str, step: int) -> None:
        self.said.append((doing, step))

    def stop_requested(self) -> bool:
        return self.stop

    def share_from_main(self, value: Any) -> Any:
        return value


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path, 0, 1, EventLog(tmp_path, 0), Follower())
    api.install(session)
    yield session
    api.install(None)


def test_without_shardtune_run_everything_does_nothing(tmp_path: Path) -> None:
    assert observe.run_dir() is None and observe.load_checkpoint() is None and not observe.stop_requested()
    assert list(observe.steps([1, 2])) == [1, 2] and observe.current_step() == 0 and observe.profile() == ""
    observe.log(loss=1.0)
    with observe.phase("evaluating"):
        assert observe.save_checkpoint(lambda folder: None) is None


def test_a_step_is_timed_with_its_wait_for_data_and_its_samples(session: Session, tmp_path: Path) -> None:
    def slow_loader() -> Iterator[list[int]]:
        for _ in range(3):
            time.sleep(0.05)
            yield [1, 2]

    for _ in observe.steps(slow_loader(), samples=len, unit="images"):
        time.sleep(0.02)
    profiles = events(tmp_path, "profile")
    assert [profile["step"] for profile in profiles] == [1, 2, 3]
    for profile in profiles:
        seconds = profile["seconds"]
        assert seconds["data"] >= 0.05 and seconds["step"] >= seconds["data"] + 0.02
        assert profile["samples"] == 2 and profile["sample_unit"] == "images"
        assert profile["samples_per_second"] == pytest.approx(2 / seconds["step"], rel=0.01)
        assert not problems(profile)
    assert "images/s/rank" in observe.profile()


def test_batches_are_added_up_to_steps_and_the_last_one_may_be_shorter(session: Session, tmp_path: Path) -> None:
    seen = [observe.current_step() for _ in observe.steps(range(5), samples=lambda batch: 4, accumulation=2)]
    assert seen == [1, 1, 2, 2, 3] and observe.current_step() == 3
    assert [profile["samples"] for profile in events(tmp_path, "profile")] == [8, 8, 4]


def test_steps_go_on_in_the_next_loop_and_a_break_counts_the_step_it_is_in(session: Session) -> None:
    for _ in observe.steps(range(10)):
        if observe.current_step() == 3:
            break
    assert observe.current_step() == 3
    assert [observe.current_step() for _ in observe.steps(range(2))] == [4, 5]


def test_time_in_a_phase_belongs_to_no_step(session: Session, tmp_path: Path) -> None:
    for _ in observe.steps(range(2)):
        with observe.phase("evaluating"):
            time.sleep(0.2)
    with observe.phase("evaluating"):
        time.sleep(0.2)
    list(observe.steps(range(1)))
    assert all(profile["seconds"]["step"] < 0.15 for profile in events(tmp_path, "profile"))
    assert ("evaluating", 1) in session.follower.said


def test_metrics_are_numbers_of_the_step_they_are_logged_in(session: Session, tmp_path: Path) -> None:
    import numpy
    import torch

    observe.log(before=True)
    for _ in observe.steps(range(1)):
        observe.log(loss=torch.tensor(0.5), lr=numpy.float32(0.25), **{"val/mAP@50": float("nan")})
    first, second = events(tmp_path, "metrics")
    assert (first["step"], first["values"]) == (0, {"before": 1})
    assert (second["step"], second["values"]) == (1, {"loss": 0.5, "lr": 0.25, "val/mAP@50": "nan"})
    assert not problems(first) + problems(second)
    for wrong in ("text", [1], torch.ones(2), None):
        with pytest.raises(TypeError, match=r"observe\.log: loss"):
            observe.log(loss=wrong)


def test_a_wrong_accumulation_is_refused(session: Session) -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="accumulation"):
            observe.steps([], accumulation=wrong)  # type: ignore[arg-type]


def test_a_checkpoint_is_whole_and_the_newest_intact_one_is_found(session: Session, tmp_path: Path) -> None:
    for _ in observe.steps(range(4)):
        observe.save_checkpoint(lambda folder: (folder / "state").write_text("x" * 100), keep=3, note="mine")
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [1, 2, 3, 4]
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(saved) == ["latest", "step-000002", "step-000003", "step-000004"]
    (tmp_path / "checkpoints" / "step-000004" / "state").write_text("damaged")
    later = Session(tmp_path, 0, 1, EventLog(tmp_path, 0), Follower())
    api.install(later)
    found = observe.load_checkpoint()
    assert found == (3, tmp_path / "checkpoints" / "step-000003")
    assert [observe.current_step() for _ in observe.steps(range(1))] == [4], "steps are counted from there"
    assert events(tmp_path, "resume")[0]["step"] == 3 and "step-000004" in events(tmp_path, "warning")[0]["text"]


def test_a_save_that_fails_leaves_nothing(session: Session, tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        observe.save_checkpoint(fill)
    assert observe.load_checkpoint() is None and not events(tmp_path, "checkpoint")


def test_other_ranks_neither_write_checkpoints_nor_take_one_they_cannot_see(tmp_path: Path) -> None:
    from shardtune.errors import UserInputError

    class Rank0HasOne(Follower):
        def share_from_main(self, value: Any) -> Any:
            return [7, []]

    api.install(Session(tmp_path, 1, 2, EventLog(tmp_path, 1), Rank0HasOne()))
    try:
        assert observe.save_checkpoint(lambda folder: None) is None and not (tmp_path / "checkpoints").exists()
        with pytest.raises(UserInputError, match="not visible to rank 1"):
            observe.load_checkpoint()
    finally:
        api.install(None)
