"""Does every family compute on two processes what it computes on one, and what plain PEFT computes on none of ours?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from support.twins import TYPES, adapted, as_peft_computes, differences, one_by_one, toy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("sharded")
    on_ranks(shared_environment, Path(__file__).parent / "sharded_worker.py", [1, 2], folder, timeout=580)
    return {world: torch.load(folder / f"{world}.pt") for world in (1, 2)}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", TYPES)
def test_gradients_over_processes_are_those_of_plain_transformers_and_peft(
    results: dict[int, dict], kind: str, world: int
) -> None:
    meant = one_by_one(as_peft_computes(adapted(toy(kind))))
    assert differences(results[world][kind], meant) == {}
