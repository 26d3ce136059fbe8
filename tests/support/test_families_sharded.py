"""Does every family compute on two processes what plain transformers and PEFT compute on one?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from support.twins import TYPES, Numbers, adapted, as_peft_computes, differences, one_by_one, toy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sharded(shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Numbers]:
    """By family."""
    folder = tmp_path_factory.mktemp("sharded")
    on_ranks(shared_environment, Path(__file__).parent / "sharded_worker.py", 2, folder, timeout=580)
    results: dict[str, Numbers] = torch.load(folder / "2.pt")
    return results


@pytest.mark.parametrize("kind", TYPES)
def test_gradients_over_processes_are_those_of_plain_transformers_and_peft(
    sharded: dict[str, Numbers], kind: str
) -> None:
    meant = one_by_one(as_peft_computes(adapted(toy(kind))))
    assert differences(sharded[kind], meant) == {}
