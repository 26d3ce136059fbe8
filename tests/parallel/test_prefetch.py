"""Layers are gathered as far ahead as was asked for, in every step, as often as needed, and numbers do not notice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from prefetch_worker import CASES, LAYERS, STEPS, case_name
from ranks import on_ranks
from sharded_events import ROOT

WORKER = Path(__file__).parent / "prefetch_worker.py"
Order = list[tuple[str, int, str]]  # kind, unit, pass
ALL = [pytest.param(*case, id=case_name(*case)) for case in CASES]


@pytest.fixture(scope="module")
def two_ranks(shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prefetch")
    on_ranks(shared_environment, WORKER, 2, out)
    return out


def steps_of(folder: Path, *case: object) -> list[Order]:
    """What happened in each step, on both ranks."""
    steps: list[Order] = []
    for rank in range(2):
        orders = json.loads((folder / f"order{rank}.json").read_text())[case_name(*case)]  # type: ignore[arg-type]
        steps += [[tuple(event) for event in step] for step in orders]
    assert len(steps) == 2 * STEPS
    return steps


def gathered_when(step: Order, kind: str, unit: int, pass_: str) -> list[int]:
    """The layers whose gathers were issued in this pass before something happened, in their order."""
    before = step[: step.index((kind, unit, pass_))]
    return [layer for what, layer, when in before if what == "gather" and when == pass_ and layer != ROOT]


@pytest.mark.parametrize("ahead, reshard, way", ALL)
def test_so_many_layers_are_asked_for_before_a_layer_computes_forward(
    two_ranks: Path, ahead: tuple[int, int], reshard: bool, way: str
) -> None:
    for step in steps_of(two_ranks, ahead, reshard, way):
        for layer in range(LAYERS):
            assert gathered_when(step, "compute", layer, "forward") == list(range(min(layer + ahead[0] + 1, LAYERS)))


@pytest.mark.parametrize("ahead, reshard, way", [param for param in ALL if param.values[1]])
def test_so_many_layers_are_asked_for_before_a_layer_goes_backward(
    two_ranks: Path, ahead: tuple[int, int], reshard: bool, way: str
) -> None:
    backwards = list(range(LAYERS))[::-1]
    for step in steps_of(two_ranks, ahead, reshard, way):
        # The head goes first, and is no layer.
        assert gathered_when(step, "compute", ROOT, "backward") == backwards[: ahead[1]]
        for done, layer in enumerate(backwards):
            assert gathered_when(step, "compute", layer, "backward") == backwards[: done + ahead[1] + 1]


@pytest.mark.parametrize("ahead, reshard, way", ALL)
def test_a_step_gathers_a_layer_twice_if_it_is_let_go_in_between_and_else_once_whatever_is_recomputed(
    two_ranks: Path, ahead: tuple[int, int], reshard: bool, way: str
) -> None:
    passes = ("forward", "backward") if reshard else ("forward",)
    for step in steps_of(two_ranks, ahead, reshard, way):
        gathers = Counter((unit, when) for kind, unit, when in step if kind == "gather")
        assert gathers == {(ROOT, "forward"): 1} | {(layer, when): 1 for layer in range(LAYERS) for when in passes}


@pytest.mark.parametrize("ahead, reshard, way", ALL)
def test_layers_are_let_go_once_they_have_computed_and_nobody_keeps_one_after_a_step(
    two_ranks: Path, ahead: tuple[int, int], reshard: bool, way: str
) -> None:
    passes = ("forward", "backward") if reshard else ("backward",)
    for step in steps_of(two_ranks, ahead, reshard, way):
        reshard_all = Counter((unit, when) for kind, unit, when in step if kind == "reshard")
        assert reshard_all == {(ROOT, "backward"): 1} | {(layer, when): 1 for layer in range(LAYERS) for when in passes}
        for layer in range(LAYERS):
            for when in passes:
                assert step.index(("compute", layer, when)) < step.index(("reshard", layer, when))
            # One at a time: a layer is gone before the next one computes.
            if reshard and layer + 1 < LAYERS:
                gone = step.index(("reshard", layer, "forward"))
                assert gone < step.index(("compute", layer + 1, "forward"))


def test_losses_and_gradients_are_the_same_numbers_with_every_setting(two_ranks: Path) -> None:
    for rank in range(2):
        numbers = torch.load(two_ranks / f"numbers{rank}.pt", weights_only=True)
        assert len(numbers) == len(CASES)
        first = numbers[case_name(*CASES[0])]
        assert len(set(first["losses"])) == STEPS  # it trains
        assert all(gradient.abs().max() > 0 for gradient in first["gradients"].values())
        for name, other in numbers.items():
            assert other["losses"] == first["losses"], name
            assert other["gradients"].keys() == first["gradients"].keys()
            for parameter, gradient in first["gradients"].items():
                assert torch.equal(other["gradients"][parameter], gradient), (name, parameter)
