"""The fastest settings that fit: batch, accumulation, recomputation and offloading, and what cannot fit at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_facts import dense_7b, smollm_135m

from shardtune.config import load_config
from shardtune.config.batch import effective_batch
from shardtune.errors import UserInputError
from shardtune.plan.facts import Facts, Machine
from shardtune.plan.resolve import ResolvedRun, resolve

GIB = 1 << 30


def on(facts: Facts, gib: float, *nodes: int, host: int = 0) -> Facts:
    machine = Machine("cuda", int(gib * GIB), nodes[0], nodes, gpu="NVIDIA H200", host_memory=host * GIB)
    return replace(facts, machine=machine)


@pytest.fixture
def chosen(tmp_path: Path) -> Any:
    file = tmp_path / "run.yaml"
    data = "data: {dataset_name_or_path: d, max_length: 4096}"
    file.write_text(f"model: {{model_name_or_path: m, torch_dtype: auto}}\n{data}\nlora: {{r: 16, lora_dropout: 0}}\n")

    def resolved(facts: Facts, *overrides: str) -> ResolvedRun:
        return resolve(load_config(file, overrides, environ={}), facts)

    return resolved


def batch(run: ResolvedRun) -> tuple[int, int]:
    return run.config.train.micro_batch, run.config.train.accumulation


def test_a_small_model_on_a_large_card_recomputes_nothing(chosen: Any) -> None:
    run = chosen(on(smollm_135m(), 139.8, 1))
    assert run.config.train.gradient_checkpointing is False and batch(run) == (8, 1)
    assert "full: " in run.reason("train.gradient_checkpointing") and "slower" in run.reason(
        "train.gradient_checkpointing"
    )


def test_less_memory_means_smaller_micro_batches_then_recomputation_then_offloading(chosen: Any) -> None:
    large, middle, small, least = (chosen(on(dense_7b(), gib, 1)) for gib in (139.8, 48, 24, 12))
    kinds = [run.config.train.gradient_checkpointing for run in (large, middle, small, least)]
    assert kinds[0] is False and kinds[2] is True
    assert batch(large)[0] >= batch(middle)[0] >= batch(small)[0]
    assert [batch(run)[0] * batch(run)[1] for run in (large, middle, small, least)] == [8, 8, 8, 8]
    assert [run.config.parallel.offload_params for run in (large, middle, small, least)] == [False, False, False, True]


def test_what_is_offloaded_must_fit_into_host_memory(chosen: Any) -> None:
    with pytest.raises(UserInputError, match="does not fit"):
        chosen(on(dense_7b(), 12, 1, host=4))


@pytest.mark.parametrize("nodes", [(8,), (8, 8), (8, 8, 8, 8)])
def test_another_number_of_nodes_keeps_the_effective_batch(nodes: tuple[int, ...], chosen: Any) -> None:
    run = chosen(on(dense_7b(), 80, *nodes), "train.effective_batch_size=128")
    per_device, accumulation = batch(run)
    assert per_device * accumulation * sum(nodes) == 128
    assert effective_batch(run.config.train, sum(nodes)) == 128


def test_a_given_batch_or_accumulation_is_kept(chosen: Any) -> None:
    facts = on(dense_7b(), 139.8, 2)
    assert batch(chosen(facts, "train.per_device_train_batch_size=2")) == (2, 1)
    assert batch(chosen(facts, "train.gradient_accumulation_steps=4")) == (8, 4)
    assert batch(chosen(facts, "train.effective_batch_size=32", "train.per_device_train_batch_size=2")) == (2, 8)
    assert batch(chosen(facts, "train.effective_batch_size=32", "train.gradient_accumulation_steps=4")) == (4, 4)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.effective_batch_size=9"], "8 or 10"),
        (["train.effective_batch_size=32", "train.per_device_train_batch_size=3"], "a divisor of 16"),
        (
            [
                "train.effective_batch_size=32",
                "train.per_device_train_batch_size=4",
                "train.gradient_accumulation_steps=2",
            ],
            "Set train.gradient_accumulation_steps: 4",
        ),
    ],
)
def test_an_effective_batch_that_cannot_be_made_is_refused(overrides: list[str], said: str, chosen: Any) -> None:
    with pytest.raises(UserInputError) as caught:
        chosen(on(dense_7b(), 139.8, 2), *overrides)
    assert said in caught.value.fix and caught.value.exit_code == 2


def test_a_family_that_is_not_in_the_table_is_warned_about_and_not_refused(chosen: Any) -> None:
    facts = replace(on(dense_7b(), 40, 1), model_type="unheard_of")
    given = [
        "train.gradient_checkpointing=none",
        "train.per_device_train_batch_size=8",
        "parallel.offload_params=false",
    ]
    assert "may run out of memory" in chosen(facts, *given).notices[0].text


def test_settings_that_were_given_and_do_not_fit_are_refused_with_those_that_do(chosen: Any) -> None:
    facts = on(dense_7b(), 40, 1)
    given = [
        "train.gradient_checkpointing=none",
        "train.per_device_train_batch_size=8",
        "parallel.offload_params=false",
    ]
    with pytest.raises(UserInputError) as caught:
        chosen(facts, *given)
    assert "GiB per GPU, and there are 40 GiB" in caught.value.what
    assert "train.gradient_checkpointing: full" in caught.value.fix
    assert "train.per_device_train_batch_size: 1" in caught.value.fix
    run = chosen(facts, *given, "guards.memory_plan=warn")
    assert any("may run out of memory" in notice.text for notice in run.notices)
    assert chosen(facts, *given, "guards.memory_plan=off").notices == ()
