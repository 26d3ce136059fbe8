from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from shardtune.observe.clocks import Mark
from shardtune.observe.collectives import CollectiveTap
from shardtune.observe.passes import PassHooks
from shardtune.observe.phases import StepTimer


class Hand:
    """A clock whose hand a test moves; it knows which marks are in use."""

    def __init__(self) -> None:
        self.now = 0.0
        self.out: list[list[float]] = []

    def mark(self) -> Mark:
        self.out.append([self.now])
        return self.out[-1]

    def is_passed(self, mark: Mark) -> bool:
        return True

    def wait_for(self, mark: Mark) -> None:
        raise AssertionError("nothing may wait for the device")

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(end[0] - begin[0])

    def recycle(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            [place] = [index for index, one in enumerate(self.out) if one is mark]  # twice would be once too often
            del self.out[place]


def spend(timer: StepTimer, phase: Any, seconds: float) -> None:
    timer.enter(phase)
    timer.clock.now += seconds  # type: ignore[attr-defined]
    timer.leave()


def test_phases_add_up_over_micro_batches_and_leave_a_rest() -> None:
    hand = Hand()
    timer = StepTimer(hand)
    timer.begin_if_new()
    for _ in range(2):
        spend(timer, "forward", 2)
        spend(timer, "backward", 4)
        hand.now += 1
    spend(timer, "optimizer", 3)
    assert timer.finish().seconds(hand) == {"step": 17, "forward": 4, "backward": 8, "optimizer": 3}


def test_waiting_for_others_is_taken_out_of_the_phase_it_lies_in() -> None:
    hand = Hand()
    timer = StepTimer(hand)
    timer.begin_if_new()
    timer.enter("forward")
    hand.now += 2
    begin = hand.mark()
    hand.now += 5
    timer.now.add("collective", begin, hand.mark(), within=timer.phase)
    timer.leave()
    seconds = timer.finish().seconds(hand)
    assert seconds == {"step": 7, "forward": 2, "collective": 5}


def test_a_step_begins_where_the_last_one_ended_unless_there_was_a_pause() -> None:
    hand = Hand()
    timer = StepTimer(hand)
    timer.begin_if_new()
    hand.now += 10
    assert timer.finish().seconds(hand)["step"] == 10
    hand.now += 1
    timer.begin_if_new()
    hand.now += 10
    assert timer.finish().seconds(hand)["step"] == 11
    hand.now += 50
    timer.pause()
    hand.now += 50
    timer.begin_if_new()
    hand.now += 10
    assert timer.finish().seconds(hand)["step"] == 10


def test_every_mark_is_given_back_once() -> None:
    hand = Hand()
    timer = StepTimer(hand)
    for _ in range(3):
        timer.begin_if_new()
        spend(timer, "forward", 1)
        timer.enter("optimizer")
        timer.drop()
        timer.pause()
        timer.begin_if_new()
        timer.finish().recycle_marks(hand)
    assert len(hand.out) == 1  # the begin of the step to come


def test_backward_lasts_from_the_first_gradient_to_the_end_of_autograds_last_callback() -> None:
    hand = Hand()
    timer = StepTimer(hand)

    class LateCallback(torch.autograd.Function):
        """As FSDP2: what ends its backward pass is queued while the pass runs."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            hand.now += 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            hand.now += 10

            def late() -> None:
                hand.now += 100

            torch.autograd.Variable._execution_engine.queue_callback(late)
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": LateCallback.apply(self.weight * input_ids).sum()}

    begun: list[Any] = []
    model = Model()
    hooks = PassHooks(model, timer, lambda: True, begun.append)
    timer.begin_if_new()
    for _ in range(2):
        loss = model(input_ids=torch.ones(1, 3))["loss"]
        hand.now += 1000  # the loss is looked at
        loss.backward()
    timer.leave()
    assert timer.finish().seconds(hand) == {"step": 2222, "forward": 2, "backward": 220, "optimizer": 0}
    assert begun == [(1, 3), (1, 3)]
    model.eval()
    model(input_ids=torch.ones(1, 3))
    hooks.close()
    assert begun == [(1, 3), (1, 3)] and not model._forward_hooks


class _Group:
    """The names of FSDP2's parameter group that are used, on a GPU that is not there."""

    def __init__(self, hand: Hand) -> None:
        self.hand, self.done = hand, []
        self.device_handle = self
        self._all_gather_comm = self._reduce_scatter_comm = None
        self._all_gather_result: Any = None

    def current_stream(self) -> _Group:
        return self

    def wait_event(self, event: float) -> None:
        self.hand.now = max(self.hand.now, event)

    def wait_for_unshard(self) -> None:
        self.done.append("copied")

    def post_backward(self) -> None:
        self.device_handle.current_stream().wait_event(9.0)


def test_on_a_gpu_the_computing_streams_waits_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    group = _Group(hand)
    monkeypatch.setattr("shardtune.observe.collectives._groups", lambda _: [group])
    monkeypatch.setattr("torch.cuda.current_stream", lambda: group)
    waited: list[float] = []

    def wait(run: Any) -> None:
        begin = hand.now
        run()
        waited.append(hand.now - begin)

    tap = CollectiveTap(nn.Linear(1, 1), wait, on_cuda=True)
    group._all_gather_result = type("Result", (), {"all_gather_event": 4.0, "all_gather_work": None})()
    group.wait_for_unshard()
    group.post_backward()
    assert waited == [4, 5] and group.done == ["copied"]
    tap.close()
    group.post_backward()
    group.wait_for_unshard()
    assert waited == [4, 5] and "wait_for_unshard" not in vars(group)


def test_a_torch_that_names_things_otherwise_is_told_of_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _Group(Hand())
    del group._all_gather_comm
    monkeypatch.setattr("shardtune.observe.collectives._groups", lambda _: [group])
    tap = CollectiveTap(nn.Linear(1, 1), lambda run: run(), on_cuda=True)
    assert not tap.is_open and "_all_gather_comm" in str(tap.why_not)
    assert "wait_for_unshard" not in vars(group)


def test_a_model_that_is_not_sharded_has_no_waits_to_time() -> None:
    tap = CollectiveTap(nn.Linear(1, 1), lambda run: run(), on_cuda=False)
    assert not tap.is_open and tap.why_not == "the model is not sharded with FSDP2"
