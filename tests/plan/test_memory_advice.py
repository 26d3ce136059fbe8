"""What would free enough: computed from what was held, cheapest first, and honest when nothing is enough."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.config.schema import RunConfig
from shardtune.plan.memory_advice import MemoryAdvice, ModelFacts, Shortage, advise

GB = 10**9
MODEL = ModelFacts(layers=32, hidden=4096, weight_bytes=2.0)


def config(**sections: dict[str, Any]) -> RunConfig:
    """With nothing left open, as a run has it."""
    settled: dict[str, Any] = {
        "model": {"model_name_or_path": "m"},
        "data": {"dataset_name_or_path": "d"},
        "train": {
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing": True,
            "offload_activations": False,
        },
        "parallel": {"offload_params": False},
    }  # fmt: skip
    return RunConfig.model_validate(
        {name: settled.get(name, {}) | sections.get(name, {}) for name in {*settled, *sections}}
    )


def answer(
    phase: str, held: dict[str, int], wanted: int, free: int = 0, *, done: int | None = None, **sections: Any
) -> MemoryAdvice:
    short = Shortage(phase, held, wanted, free, 80 * GB, done)
    return advise(short, config(**sections), MODEL, processes=4)


def test_a_smaller_micro_batch_comes_first_and_is_the_largest_that_fits() -> None:
    held = {"weights": 10 * GB, "activations": 60 * GB, "loss": 8 * GB}
    train = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
    found = answer("backward", held, 4 * GB, 2 * GB, train=train)
    first = found.advice[0]
    assert found.needed == 2 * GB + 1.6 * GB  # what was missing, and 2 % of the GPU
    assert (first.setting, first.value) == ("train.per_device_train_batch_size", "4")
    assert first.frees == (60 + 4 + 8) * GB // 2
    assert "train.gradient_accumulation_steps: 4" in first.text
    assert "first change alone is enough" in found.verdict
    assert [(one.setting, one.value) for one in found.advice[1:4]] == [
        ("train.gradient_checkpointing", "selective"), ("train.gradient_checkpointing", "full"),
        ("model.base_precision", "fp8"),
    ]  # fmt: skip


def test_the_batch_is_made_as_small_as_it_has_to_be() -> None:
    train = {"per_device_train_batch_size": 8}
    found = answer("backward", {"weights": 60 * GB, "activations": 14 * GB}, 12 * GB, train=train)
    assert found.advice[0].value == "2"  # 26 GB × 6/8 = 19.5 GB where 13.6 GB are missing; 4 would free 13
    assert found.advice[0].frees == pytest.approx(26 * GB * 6 / 8)


def test_in_the_middle_of_a_forward_pass_the_other_layers_are_reckoned_with() -> None:
    held = {"weights": 10 * GB, "activations": 7 * GB}
    train = {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    found = answer("forward", held, 1 * GB, done=7, train=train)
    assert found.needed == (7 + 1) * 32 // 8 * GB - 7 * GB + 1.6 * GB
    assert answer("forward", held, 1 * GB, done=7, train={}).needed == 1 * GB + 1.6 * GB  # recomputed: nothing piles up


def test_checkpointing_leaves_one_layer_and_the_inputs_of_all() -> None:
    train = {"per_device_train_batch_size": 1, "gradient_checkpointing": False}
    found = answer(
        "backward", {"activations": 64 * GB}, 0, train=train, data={"dataset_name_or_path": "d", "max_length": 8192}
    )
    selective, full = (one for one in found.advice if one.setting == "train.gradient_checkpointing")
    inputs = 32 * 4096 * 8192 * 2
    assert (full.value, full.frees) == ("full", pytest.approx(64 * GB - 2 * GB - inputs, rel=1e-6))
    assert (selective.value, selective.frees) == ("selective", pytest.approx(0.3 * 64 * GB, rel=1e-6))


def test_selective_recomputation_gives_way_to_full_where_it_is_not_enough() -> None:
    train = {"per_device_train_batch_size": 1, "gradient_checkpointing": "none"}
    found = answer("backward", {"weights": 40 * GB, "activations": 30 * GB}, 12 * GB, train=train)
    values = [one.value for one in found.advice if one.setting == "train.gradient_checkpointing"]
    assert values == ["full"]  # 0.3 × 42 GB are less than the 13.6 GB that are missing


def test_where_recomputation_is_selective_full_comes_next_and_activations_still_pile_up() -> None:
    train = {"per_device_train_batch_size": 1, "gradient_checkpointing": "selective"}
    found = answer("forward", {"weights": 10 * GB, "activations": 7 * GB}, 1 * GB, done=7, train=train)
    assert found.needed == (7 + 1) * 32 // 8 * GB - 7 * GB + 1.6 * GB
    values = [one.value for one in found.advice if one.setting == "train.gradient_checkpointing"]
    assert values == ["full"]


def test_where_all_is_recomputed_the_layers_inputs_can_wait_in_host_memory() -> None:
    data = {"dataset_name_or_path": "d", "max_length": 8192}
    one_input = 4096 * 8192 * 2

    def freed(phase: str, done: int | None, **train: Any) -> list[int]:
        train = {"per_device_train_batch_size": 1, **train}
        found = answer(phase, {"activations": 8 * GB}, 0, done=done, train=train, data=data)
        return [one.frees for one in found.advice if one.setting == "train.offload_activations"]

    assert freed("backward", None) == [pytest.approx(29 * one_input, rel=1e-6)]  # three of 32 stay
    assert freed("forward", 20) == [pytest.approx(17 * one_input, rel=1e-6)]  # those of the layers so far
    assert freed("forward", 2) == freed("evaluation", None) == freed("optimizer", None) == []
    assert freed("backward", None, offload_activations=True) == []
    assert freed("backward", None, gradient_checkpointing="selective") == []


def test_what_is_on_already_or_cannot_help_is_not_advised() -> None:
    on = {
        "model": {"model_name_or_path": "m", "base_precision": "fp8"},
        "parallel": {"offload_params": True},
        "train": {"per_device_train_batch_size": 1, "offload_activations": True},
        "lora": {"r": 2},
    }
    found = answer("backward", {"activations": 50 * GB, "gathered": 5 * GB}, 1 * GB, **on)
    assert [one.setting for one in found.advice] == ["data.max_length"]
    loading = answer("loading", {"weights": 70 * GB}, 20 * GB)
    assert [one.setting for one in loading.advice] == [
        "model.base_precision",
        "parallel.offload_params",
        "parallel.nproc",
    ]
    assert [one.frees for one in loading.advice] == [45 * GB, 90 * GB, 45 * GB]


def test_an_evaluation_is_given_a_smaller_batch_of_its_own() -> None:
    found = answer("evaluation", {"activations": 40 * GB}, 5 * GB, train={"per_device_eval_batch_size": 10})
    assert (found.advice[0].setting, found.advice[0].value) == ("train.per_device_eval_batch_size", "8")


def test_gathered_layers_are_let_go_where_they_are_kept() -> None:
    found = answer(
        "forward", {"gathered": 64 * GB, "weights": GB}, 1 * GB, done=32, parallel={"reshard_after_forward": False}
    )
    reshard = next(one for one in found.advice if one.setting == "parallel.reshard_after_forward")
    assert reshard.frees == pytest.approx(64 * GB * 30 / 32)


def test_no_single_change_is_enough_but_several_are() -> None:
    held = {"weights": 20 * GB, "activations": 16 * GB}
    train = {"per_device_train_batch_size": 2, "offload_activations": True}
    found = answer("backward", held, 30 * GB, train=train, parallel={"offload_params": True},
                   lora={"r": 2})  # fmt: skip
    assert found.needed > max(one.frees for one in found.advice)
    assert "no single change is enough, but the first 2 together are" in found.verdict


def test_it_says_so_when_nothing_is_enough() -> None:
    held = {"weights": 78 * GB, "activations": 1 * GB}
    found = answer("loading", held, 900 * GB, parallel={"offload_params": True})
    assert "use more or larger GPUs, or a smaller model" in found.verdict


def test_what_is_enough_alone_comes_before_what_is_cheaper_and_is_not() -> None:
    train = {"per_device_train_batch_size": 2}
    found = answer("backward", {"weights": 60 * GB, "activations": 8 * GB}, 12 * GB, train=train)
    assert [one.setting for one in found.advice[:3]] == [
        "model.base_precision", "parallel.offload_params", "parallel.nproc",
    ]  # fmt: skip
    assert found.advice[3].setting == "train.per_device_train_batch_size" and found.advice[3].frees < found.needed


@pytest.mark.parametrize(
    ("parallel", "frees"),
    [
        ({"shard": "replicate"}, {"parallel.shard": 45, "parallel.nproc": 2}),
        ({"shard": "hybrid", "shard_size": 2}, {"parallel.shard": 30}),
        ({"shard": "full"}, {"parallel.nproc": 32}),
    ],
)
def test_replicas_are_sharded_further_and_more_gpus_divide_only_what_is_sharded_over_all(
    parallel: dict[str, Any], frees: dict[str, int]
) -> None:
    found = answer("forward", {"weights": 60 * GB, "optimizer": 4 * GB}, GB, parallel=parallel)
    asked = ("parallel.shard", "parallel.nproc")
    assert {one.setting: one.frees // GB for one in found.advice if one.setting in asked} == frees
