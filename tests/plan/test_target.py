from __future__ import annotations

from typing import Any

import pytest

from shardtune.config.schema import ParallelSection
from shardtune.errors import UserInputError
from shardtune.plan.target import target_of

H200 = {"name": "NVIDIA H200", "memory": 139 << 30}


def machine(gpus_here: Any = (), *, nproc: Any = "auto", device: Any = "auto", **options: Any) -> Any:
    return target_of(ParallelSection(nproc=nproc, device=device), gpus_here, **options).machine


def test_named_gpus_are_those_of_each_node() -> None:
    found = machine([H200], gpus="8xH100", nodes=2)
    assert found.nodes == (8, 8) and found.device == "cuda" and found.gpu == "H100"


def test_without_a_name_it_is_this_machine_with_the_least_memory_of_its_gpus() -> None:
    found = machine([H200, {**H200, "memory": 100 << 30}], nodes=3)
    assert found.nodes == (2, 2, 2) and found.memory == 100 << 30
    assert machine([]).device == machine([H200], device="cpu").device == "cpu"
    assert machine([], nproc=2).nodes == (2,)


def test_the_configs_number_of_processes_is_respected_and_refused_where_gpus_are_too_few() -> None:
    assert machine(gpus="8xH100", nproc=4, nodes=2).nodes == (4, 4)
    with pytest.raises(UserInputError, match=r"parallel.nproc is 4, but a node has 2 GPUs \(2xH100\)"):
        machine(gpus="2xH100", nproc=4)


def test_gpus_for_a_config_that_computes_on_the_cpu_are_refused() -> None:
    with pytest.raises(UserInputError, match=r"--gpus is 2xH100, but parallel.device is cpu"):
        machine(gpus="2xH100", device="cpu")
