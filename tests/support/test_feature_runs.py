"""Does each feature train over two processes and through a crash there with the losses of an undisturbed run on one?

All rows are one batch, so that processes change how a step is computed, and never what it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import on_ranks
from running import events
from support.features import HOW, PLAIN, REFUSED, RUNS, WHAT
from toys import save_toy, toy_config, toy_rows, toy_text_config

pytestmark = pytest.mark.slow
assert not [pair for pair in REFUSED if pair & set(RUNS)]
PLAIN_RUN, DISTURBED_RUN = "plain", "resumed"


def sessions(how: str) -> list[tuple[str, str, list[str]]]:
    """Names, models and overrides of the runs."""
    more = [override for name in RUNS for override in HOW[name]] if how == DISTURBED_RUN else []
    return [
        (named(what, how), "mixture" if what == "expert LoRA" else "dense", [*settings, *PLAIN, *more])
        for what, settings in WHAT.items()
    ]


def named(what: str, how: str) -> str:
    return f"{what} {how}".replace(" ", "-")


@pytest.fixture(scope="module")
def runs(shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("features")
    data = toy_rows(folder / "data", rows=8, val_rows=5)
    biased = {"attention_bias": True, "mlp_bias": True}
    save_toy(transformers.LlamaForCausalLM, toy_text_config("llama", **biased), folder / "dense")
    save_toy(transformers.MixtralForCausalLM, toy_text_config("mixtral"), folder / "mixture")
    for model in ("dense", "mixture"):
        made = toy_config(
            folder, folder / model, data, lora={"target_modules": "all-linear"}, data={"val_split": "validation"},
            train={
                "max_steps": 3, "per_device_train_batch_size": 8, "eval_steps": 3, "save_strategy": "steps",
                "save_steps": 2,
            },
        )  # fmt: skip
        made.rename(folder / f"{model}.yaml")
    worker = Path(__file__).parent / "features_worker.py"
    asked = {1: sessions(PLAIN_RUN), 2: sessions(DISTURBED_RUN)}
    on_ranks(shared_environment, worker, list(asked), folder, json.dumps(asked), timeout=590)
    return folder / "runs"


def numbers(run: Path) -> list[float]:
    losses = {event["step"]: event["loss"] for event in events(run, "step")}
    assert sorted(losses) == [1, 2, 3]
    return [*(losses[step] for step in (1, 2, 3)), events(run, "eval")[-1]["loss"]]


@pytest.mark.parametrize("what", WHAT)
def test_a_feature_trains_with_the_losses_of_one_undisturbed_process(runs: Path, what: str) -> None:
    plain, disturbed = runs / named(what, PLAIN_RUN), runs / named(what, DISTURBED_RUN)
    assert numbers(disturbed) == pytest.approx(numbers(plain), rel=5e-4)
    assert numbers(plain)[2] < numbers(plain)[0]  # it learns
    assert [event["world_size"] for event in events(disturbed, "run_start")] == [2, 2]
    assert len(events(disturbed, "resume")) == 1
