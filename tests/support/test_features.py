"""Does each pair of features train, with the losses of plain transformers and PEFT code? Or is it refused, as the table says?

All rows are one batch, so that packing and processes change how a step is computed, and never what it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import free_ports, on_ranks
from running import events
from support.features import CELLS, FAST, HOW, PAIRS, PLAIN, REFUSED, WHAT, Cell
from toys import save_toy, toy_config, toy_rows, toy_text_config

pytestmark = pytest.mark.slow
Session = tuple[str, str, list[str]]


def sessions() -> dict[int, list[Session]]:
    """By number of processes: names, models and overrides of the runs."""

    def one(name: str, *features: str, more: list[str]) -> Session:
        model = "mixture" if "expert LoRA" in features else "dense"
        return name, model, [*(item for feature in features for item in WHAT[feature]), *more]

    alone = [one(f"{what} plain", what, more=PLAIN) for what in WHAT]
    for what in WHAT:
        alone += [one(f"{what} + {how}", what, more=[*PLAIN, *HOW[how]]) for how in HOW if how != "two processes"]
    for first, second in PAIRS:
        alone.append(one(f"{first} + {second} plain", first, second, more=PLAIN))
        alone.append(one(f"{first} + {second}", first, second, more=FAST))
    shared = [one(f"{what} + two processes", what, more=[*PLAIN, *HOW["two processes"]]) for what in WHAT]
    return {1: alone, 2: shared}


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
                "save_steps": 2, "extra": {"router_aux_loss_coef": 0.0},
            },
        )  # fmt: skip
        made.rename(folder / f"{model}.yaml")
    worker = Path(__file__).parent / "features_worker.py"
    for world, asked in sessions().items():
        ports = json.dumps(free_ports(len(asked)))
        on_ranks(shared_environment, worker, world, folder, ports, json.dumps(asked), timeout=590)
    return folder


def numbers(runs: Path, name: str, world: int = 1) -> list[float]:
    outcome = json.loads((runs / f"{world}.json").read_text())[name]
    assert not outcome.startswith("refused"), outcome
    run = runs / "runs" / outcome
    losses = {event["step"]: event["loss"] for event in events(run, "step")}
    assert sorted(losses) == [1, 2, 3]
    return [*(losses[step] for step in (1, 2, 3)), events(run, "eval")[-1]["loss"]]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if frozenset(cell) not in REFUSED], ids=" + ".join)
def test_the_pair_trains_with_the_losses_of_plain_code(runs: Path, cell: Cell) -> None:
    first, second = cell
    world = 2 if second == "two processes" else 1
    plain = numbers(runs, f"{first} plain" if second in HOW else f"{first} + {second} plain")
    assert numbers(runs, f"{first} + {second}", world) == pytest.approx(plain, rel=5e-4)
    assert plain[-2] < plain[0]  # it learns


@pytest.mark.parametrize("cell", [cell for cell in CELLS if frozenset(cell) in REFUSED], ids=" + ".join)
def test_the_pair_is_refused_with_its_reason(runs: Path, cell: Cell) -> None:
    outcome = json.loads((runs / "1.json").read_text())[" + ".join(cell)]
    assert outcome.startswith("refused") and REFUSED[frozenset(cell)] in outcome
