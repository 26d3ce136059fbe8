"""Every recipe in configs/ is strictly valid, fits the GPUs that it is for, and is trained there as it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import REPOSITORY

from shardtune.config import load_config
from shardtune.config.schema import RunConfig
from shardtune.data.estimate import DataSize
from shardtune.plan.gather import gather_facts
from shardtune.plan.init_config import InitFacts, ModelFacts, choices
from shardtune.plan.public_models import outline_of_public
from shardtune.plan.report import Plan, assemble
from shardtune.plan.target import target_of
from shardtune.quickstart.recipe import config_text

CONFIGS = REPOSITORY / "configs"
ROWS = 20_000  # as long as data.max_length: what needs the most memory


@dataclass(frozen=True)
class For:
    """What a recipe is for, and what is expected of its plan there."""

    model: str
    gpus: str
    precision: str
    shard: str = "replicate"
    nodes: int = 1


RECIPES = {
    "smollm2-quickstart": [For("SmolLM2-135M", "1xRTX-4090", "bf16"), For("SmolLM2-135M", "2xL40S", "bf16")],
    "dense-8b-one-gpu": [For("Llama-3.1-8B", f"1x{gpu}", "bf16") for gpu in ("RTX-4090", "L40S", "H100", "H200")],
    "instruction-chat": [For("Llama-3.1-8B", f"1x{gpu}", "bf16") for gpu in ("L40S", "H100", "H200")],
    "domain-corpus": [For("Llama-3.2-1B", f"1x{gpu}", "bf16") for gpu in ("RTX-4090", "L40S", "H200")],
    "mistral-small-4": [
        For("Mistral Small 4", "1xH200", "fp8"),
        For("Mistral Small 4", "2xH200", "fp8", "full"),
        For("Mistral Small 4", "3xH200", "fp8", "full"),
        For("Mistral Small 4", "1xH200", "fp8", "replicate", nodes=3),
        For("Mistral Small 4", "8xH200", "fp8", "hybrid"),
    ],
    "mistral-small-4-one-h200": [For("Mistral Small 4", "1xH200", "fp8")],
    "two-nodes-on-a-cluster": [For("Llama-3.1-8B", "8xH200", "bf16", nodes=2)],
}
CASES = [(recipe, where) for recipe, wanted in RECIPES.items() for where in wanted]


def plan_for(recipe: str, where: For) -> Plan:
    asked = load_config(CONFIGS / f"{recipe}.yaml", environ={})
    target = target_of(asked.config.parallel, (), gpus=where.gpus, nodes=where.nodes)
    length = asked.config.data.max_length
    data = DataSize(ROWS, ROWS * length, ROWS, 0, exact=True, how="full rows")
    facts = gather_facts(asked.config, outline_of_public(where.model), target.machine, lambda: 1.0)
    return assemble(asked.on_device(target.machine.device), facts, target.cluster, data)


def test_every_recipe_has_gpus_that_it_is_for() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(RECIPES)


@pytest.mark.parametrize(("recipe", "where"), CASES, ids=lambda one: one.gpus if isinstance(one, For) else one)
def test_it_fits_with_the_precision_and_the_sharding_that_are_meant(recipe: str, where: For) -> None:
    plan = plan_for(recipe, where)
    assert plan.fits, plan.memory
    config = plan.config
    assert (config.model.base_precision, config.parallel.shard) == (where.precision, where.shard)
    rows = config.train.micro_batch * config.train.accumulation * plan.facts.machine.world_size
    assert rows == config.train.effective_batch_size, "the same rows a step on any number of GPUs"


def test_three_gpus_train_mistral_small_4_faster_than_two_and_two_faster_than_one() -> None:
    rates = [
        plan_for("mistral-small-4", where).time.tokens_per_second
        for where in RECIPES["mistral-small-4"]
        if where.nodes == 1
    ]
    assert rates == sorted(rates)
    one = plan_for("mistral-small-4-one-h200", RECIPES["mistral-small-4-one-h200"][0]).time.tokens_per_second
    assert rates[0] < one < rates[1], "what the second file is for"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_evaluation_has_its_checkpoint_and_the_best_is_published(recipe: str) -> None:
    train = load_config(CONFIGS / f"{recipe}.yaml", environ={}).config.train
    assert train.eval_steps == train.save_steps and train.load_best_model_at_end


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_comment_says_for_whom_it_is_and_its_commands_name_it(recipe: str) -> None:
    lines = (CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    comment = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    assert 3 <= len(comment) <= 6
    commands = [line for line in comment if line.startswith("#   shardtune ")]
    assert any("shardtune train" in line or "shardtune submit" in line for line in commands)
    named = re.findall(r"configs/[\w.-]+", "\n".join(comment))
    assert set(named) == {f"configs/{recipe}.yaml"}


@pytest.mark.parametrize("recipe", ["dense-8b-one-gpu", "instruction-chat", "domain-corpus", "mistral-small-4"])
def test_it_has_the_settings_that_init_would_write(recipe: str) -> None:
    plan = plan_for(recipe, RECIPES[recipe][-1])
    config = load_config(CONFIGS / f"{recipe}.yaml", environ={}).config
    outline = outline_of_public(RECIPES[recipe][-1].model)
    model = ModelFacts(parameters=outline.size, has_experts="mistral" in recipe)
    facts = InitFacts(model, "", False, ROWS, None, "validation", plan.facts.machine, {})
    found = {path: value for path, value, _ in choices(facts, ("data.max_length", config.data.max_length, ""))}
    here = {f"{section}.{name}": value for section, values in config for name, value in values}
    decided = {
        # More rank for knowledge than for a style, as the comment on init's own r says; alpha stays twice of it.
        "domain-corpus": {"lora.r": 64, "lora.lora_alpha": 128},
        # One file for several numbers of processes: rows that 3, 6 and 24 divide too, rather than a power of two.
        "dense-8b-one-gpu": {"train.effective_batch_size": 96},
        "mistral-small-4": {"train.effective_batch_size": 24},
    }.get(recipe, {})
    compared = (
        "model.base_precision", "lora.r", "lora.lora_alpha", "lora.target_modules", "lora.experts",
        "train.effective_batch_size", "train.per_device_train_batch_size", "train.gradient_accumulation_steps",
        "train.learning_rate", "train.load_best_model_at_end",
    )  # fmt: skip
    wanted = {path: found[path] for path in compared if path in found} | decided
    assert {path: here[path] for path in wanted} == wanted
    if "lora.lora_dropout" in found:
        assert here["lora.lora_dropout"] == found["lora.lora_dropout"]


def test_the_quickstarts_recipe_trains_as_the_quickstart_does() -> None:
    import yaml

    written = yaml.safe_load(config_text(Path("m"), Path("d"), Path("o")))
    quickstart = RunConfig.model_validate(written)
    recipe = load_config(CONFIGS / "smollm2-quickstart.yaml", environ={}).config
    assert recipe.lora == quickstart.lora
    paths = {"dataset_name_or_path"}
    assert recipe.data.model_dump(exclude=paths) == quickstart.data.model_dump(exclude=paths)
    assert recipe.model.torch_dtype == quickstart.model.torch_dtype
    assert recipe.train.effective_batch_size == 2 * quickstart.train.per_device_train_batch_size  # two processes
    for name in ("max_steps", "learning_rate", "warmup_steps", "weight_decay", "bf16", "packing", "lr_scheduler_type"):
        assert getattr(recipe.train, name) == getattr(quickstart.train, name), name
