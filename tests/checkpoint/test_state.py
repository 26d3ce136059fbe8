"""Random state and optimizer state go out and come back exactly, without a pickle anywhere."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardtune.checkpoint.optimizer import gather_optimizer, load_optimizer
from shardtune.checkpoint.rng import load_rng, pack_rng
from shardtune.errors import ShardtuneError

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(), np.random.rand(), np.random.randn()]


def test_every_generator_goes_on_where_it_stood() -> None:
    draw()  # an odd number of normal draws: numpy and Python each hold one back
    blob = pack_rng(CPU)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    load_rng(blob, CPU)
    assert [draw() for _ in range(3)] == expected


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_state_of_a_plain_tensor_that_is_not_sharded_is_refused_rather_than_one_ranks_kept() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with pytest.raises(ShardtuneError, match="neither a number nor sharded"):
        gather_optimizer(model, optimizer, keep=True)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"exp_avg/nobody": torch.zeros(4, 4)}, "'nobody' is unknown"),
        ({"exp_avg/weight": torch.zeros(2, 4)}, r"shape \[2, 4\]"),
        ({"exp_avg/weight": torch.zeros(4, 4)}, "of 1 tensors, the model trains 2"),
    ],
)
def test_state_of_another_model_is_refused(tensors: dict[str, torch.Tensor], why: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ShardtuneError, match=why):
        load_optimizer(model, torch.optim.AdamW(model.parameters()), tensors)


def test_a_number_of_the_state_is_restored_as_it_was_saved_and_not_shared() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = torch.optim.NAdam(model.parameters())
    step(model.float(), optimizer), model.bfloat16()
    saved = {f"{key}/weight": value.clone() for key, value in optimizer.state[model.weight].items()}
    fresh = torch.optim.NAdam(model.parameters())
    load_optimizer(model, fresh, saved)
    state = fresh.state[model.weight]
    for key in ("step", "mu_product"):
        assert torch.equal(state[key], saved[f"{key}/weight"]) and state[key].dtype == torch.float32
        state[key] += 1
        assert not torch.equal(state[key], saved[f"{key}/weight"])


def test_nothing_of_ours_reads_or_writes_a_pickle() -> None:
    package = Path(__file__).parents[2] / "shardtune"
    pattern = re.compile(
        r"^\s*(import|from) (pickle|dill|joblib|cloudpickle)\b|torch\.(load|save)\(|allow_pickle=True", re.M
    )
    assert [path.name for path in package.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))] == []
