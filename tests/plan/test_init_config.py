"""What `shardtune init` chooses, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from shardtune.plan.facts import Machine
from shardtune.plan.init_config import InitFacts, ModelFacts, choices, choose_max_length, render_config

ONE_GPU = Machine("cuda", 100 << 30, 1, (1,), gpu="H200")
FACTS = InitFacts(
    model=ModelFacts(parameters=8_000_000_000, context=131072),
    format="chat", concatenated=False, rows=50_000, sequences=20_000, val_split=None, machine=ONE_GPU, given={},
)  # fmt: skip


def chosen(facts: InitFacts = FACTS, max_length: int = 1024) -> dict[str, Any]:
    return {path: value for path, value, _ in choices(facts, ("data.max_length", max_length, ""))}


@pytest.mark.parametrize(
    ("lengths", "context", "expected"),
    [
        ([100] * 99 + [5000], None, 512),  # one of a hundred may be truncated
        ([100] * 90 + [5000] * 10, None, 8192),
        ([1024] * 100, None, 1024),
        ([1025] * 100, None, 2048),
        ([5000] * 100, 4096, 4096),
        ([10] * 100, 256, 256),
        ([10**6] * 100, None, 32768),
        ([], None, 2048),
    ],
)
def test_the_length_is_a_power_of_two_that_nearly_all_rows_fit_into(
    lengths: list[int], context: int | None, expected: int
) -> None:
    assert choose_max_length(lengths, "", context, concatenated=False)[1] == expected


def test_the_reason_of_the_length_says_what_is_truncated() -> None:
    why = choose_max_length([100] * 199 + [5000], "in a sample", None, concatenated=False)[2]
    assert why == "99 % of the rows have at most 100 tokens (in a sample); 0.5 % are longer, and are truncated"


@pytest.mark.parametrize(("nodes", "ranks", "batch"), [(1, 1, 64), (1, 8, 64), (3, 1, 48), (2, 6, 48), (16, 8, 128)])
def test_the_effective_batch_divides_among_all_ranks(nodes: int, ranks: int, batch: int) -> None:
    machine = Machine("cuda", 100 << 30, ranks, (ranks,) * nodes, gpu="H200")
    assert chosen(replace(FACTS, machine=machine))["train.effective_batch_size"] == batch


def test_little_data_gets_a_smaller_batch_and_more_epochs() -> None:
    large, small = chosen(), chosen(replace(FACTS, rows=1000, sequences=400))
    assert (large["train.effective_batch_size"], small["train.effective_batch_size"]) == (64, 8)
    assert (large["train.num_train_epochs"], small["train.num_train_epochs"]) == (1, 3)
    assert large["data.val_split"] == 0.02 and small["data.val_split"] == 0.1


def test_too_few_rows_are_not_held_out_and_nothing_is_evaluated() -> None:
    few = chosen(replace(FACTS, rows=50, sequences=10))
    assert few["data.val_split"] is None
    assert not {"train.eval_steps", "train.load_best_model_at_end"} & set(few)
    assert few["train.save_steps"] == 1


def test_a_large_model_gets_a_lower_learning_rate_and_routed_experts_no_adapters() -> None:
    assert chosen()["train.learning_rate"] == 2e-4 and "lora.experts" not in chosen()
    mixture = chosen(replace(FACTS, model=ModelFacts(parameters=119_000_000_000, has_experts=True)))
    assert mixture["train.learning_rate"] == 1e-4
    assert mixture["lora.experts"] is False and mixture["lora.lora_dropout"] == 0


def test_what_the_user_decided_stays_and_decides_what_follows() -> None:
    given = chosen(replace(FACTS, given={"data.val_split": None, "train.save_strategy": "epoch", "lora.r": 64}))
    assert given["lora.r"] == 64 and given["data.val_split"] is None and given["train.save_strategy"] == "epoch"
    assert not {"train.eval_steps", "train.save_steps", "train.load_best_model_at_end"} & set(given)


def reasons(facts: InitFacts) -> dict[str, str]:
    return {path: why for path, _, why in choices(facts, ("data.max_length", 1024, ""))}


def test_intervals_fit_the_number_of_steps_that_is_asked_for() -> None:
    asked = replace(FACTS, val_split="validation", given={"train.max_steps": 30})
    found, why = chosen(asked), reasons(asked)
    assert (found["train.eval_steps"], found["train.save_steps"]) == (2, 2) and found["train.load_best_model_at_end"]
    assert "train.num_train_epochs" not in found and why["train.eval_steps"] == why["train.save_steps"] == "of 30 steps"


def test_the_batch_does_not_read_little_data_too_often_in_the_steps_that_are_asked_for() -> None:
    little = replace(FACTS, rows=200, sequences=40)
    few, many = (replace(little, given={"train.max_steps": steps}) for steps in (1, 30))
    assert chosen(few)["train.effective_batch_size"] == 64 and chosen(many)["train.effective_batch_size"] == 8
    assert reasons(many)["train.effective_batch_size"].startswith("64 would read the data 48 times in 30 steps;")
    assert reasons(little)["train.effective_batch_size"].startswith("64 would leave only 2 steps;")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train.eval_steps": 5}, (5, 5, True)),
        ({"train.save_steps": 5}, (5, 5, True)),
        ({"train.eval_steps": 5, "train.save_steps": 10}, (5, 10, True)),
        ({"train.eval_steps": 10, "train.save_steps": 5}, (10, 5, None)),  # checkpoints without a validation loss
        ({"train.eval_strategy": "no"}, (None, 20, None)),
        ({"train.eval_strategy": "steps", "train.save_total_limit": 2}, (20, 20, True)),
        ({"train.load_best_model_at_end": False}, (20, 20, False)),
    ],
)
def test_of_evaluating_and_saving_what_is_given_decides_the_rest(given: dict[str, Any], expected: tuple[Any]) -> None:
    found = chosen(replace(FACTS, given={"train.max_steps": 200, **given}))
    keys = ("train.eval_steps", "train.save_steps", "train.load_best_model_at_end")
    assert tuple(found.get(key) for key in keys) == expected


def test_that_the_best_weights_are_kept_is_said_only_where_they_are() -> None:
    small = replace(FACTS, rows=1000, sequences=400)
    path = "train.num_train_epochs"
    assert reasons(small)[path] == "usual for 1,000 rows; load_best_model_at_end keeps the best weights"
    for given in ({"data.val_split": None}, {"train.load_best_model_at_end": False}, {"train.save_strategy": "epoch"}):
        assert reasons(replace(small, given=given))[path] == "usual for 1,000 rows", given


def test_every_setting_has_its_description_and_reason_above_it() -> None:
    found = [("lora.r", 8, "small"), ("model.model_name_or_path", "org/model", ""), ("train.packing", "auto", "")]
    text = render_config(found, {"train.packing": "auto = true: attention keeps rows apart."}, ["For a test."])
    assert yaml.safe_load(text) == {
        "model": {"model_name_or_path": "org/model"}, "lora": {"r": 8}, "train": {"packing": "auto"},
    }  # fmt: skip
    assert text.startswith("# For a test.\n\nmodel:\n  model_name_or_path: org/model\n")
    assert "  # Rank of the adapters.\n  # Small.\n  r: 8\n" in text
    assert "  # auto = true: attention keeps rows apart.\n  packing: auto\n" in text
