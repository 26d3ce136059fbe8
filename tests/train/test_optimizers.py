"""Every optimizer does to shards, on 1 to 3 ranks and on two by two, what torch's own does to whole tensors, bit for bit."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers_worker import CASES, FAST
from ranks import on_ranks
from torch import nn
from transformers import LlamaForCausalLM, Trainer
from transformers.training_args import OptimizerNames

from shardtune.adapters.lora import add_lora
from shardtune.config import optimizers as specs
from shardtune.config.schedules import REFUSED_SCHEDULES, SCHEDULES
from shardtune.config.schema import LoraSection, TrainSection
from shardtune.train.optimizers import OPTIMIZERS, build_optimizer

WORKER = Path(__file__).parent / "optimizers_worker.py"
CPU = torch.device("cpu")
PROMISES = ("moved", "as torch on shards", "as torch unsharded", "on shards", "state", "resumed")


def check_on_ranks(environment: dict[str, str], out: Path, cases: tuple[str, ...]) -> None:
    on_ranks(environment, WORKER, (1, 2, 3, 4, 1), out, *cases)  # each resumes what the one before has saved
    for world in (1, 2, 3, 4):
        for rank in range(world):
            seen = json.loads((out / f"rank{rank}of{world}.json").read_text())
            promised = dict.fromkeys((*PROMISES, "saved by other ranks", "resumed on other ranks"), True)
            assert seen == dict.fromkeys(cases, promised), f"rank {rank} of {world}"


@pytest.mark.slow
def test_adamw_and_sgd_are_the_same_sharded_unsharded_and_resumed_on_other_ranks(
    environment: dict[str, str], tmp_path: Path
) -> None:
    check_on_ranks(environment, tmp_path, FAST)


@pytest.mark.slow
def test_all_other_optimizers_are_the_same_sharded_unsharded_and_resumed_on_other_ranks(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert {optim for optim, _ in CASES.values()} == set(OPTIMIZERS)
    check_on_ranks(environment, tmp_path, tuple(case for case in CASES if case not in FAST))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_sharded_is_stepped_on_as_torch_does(name: str) -> None:
    model = nn.Linear(4, 4)
    twin = nn.Linear(4, 4)
    twin.load_state_dict(model.state_dict())
    stock = getattr(torch.optim, specs.OPTIMIZERS[name].torch_class)(twin.parameters(), lr=0.1, weight_decay=0.0)
    train = TrainSection(optim=name, learning_rate=0.1, weight_decay=0.0)
    for one, optimizer in ((model, build_optimizer(model, train, CPU)), (twin, stock)):
        for _ in range(2):
            one(torch.arange(4.0)).sum().backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_without_gradients_changes_nothing(name: str) -> None:
    model = nn.Linear(4, 4)
    before = [parameter.clone() for parameter in model.parameters()]
    build_optimizer(model, TrainSection(optim=name), CPU).step()
    assert all(map(torch.equal, before, model.parameters()))


def test_biases_and_norms_are_not_decayed_as_in_transformers(toy_model: Path) -> None:
    lora = LoraSection(target_modules="q_proj", modules_to_save=["lm_head", "input_layernorm"], bias="all")
    model, *_ = add_lora(LlamaForCausalLM.from_pretrained(toy_model), lora)
    model.base_model.model.model.extra = nn.ModuleDict({"ln_1": nn.LayerNorm(3), "q_norm": nn.Linear(2, 2)})
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed, others = build_optimizer(model, TrainSection(weight_decay=0.3), CPU).param_groups
    theirs = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert {names[id(p)] for p in decayed["params"]} == theirs & set(names.values())
    assert {names[id(p)] for p in others["params"]} == set(names.values()) - theirs
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert decayed["params"] and any("ln_1" in names[id(p)] for p in others["params"])


def test_every_optimizer_of_transformers_is_there_or_refused_with_a_reason() -> None:
    assert {name.value for name in OptimizerNames} <= set(specs.OPTIMIZERS) | set(specs.REFUSED_OPTIMIZERS)
    of_torch = {name.lower() for name, kind in vars(torch.optim).items() if inspect.isclass(kind)} - {"optimizer"}
    known = {spec.torch_class.lower() for spec in specs.OPTIMIZERS.values()}
    assert of_torch <= known | {name.replace("_", "") for name in specs.REFUSED_OPTIMIZERS}
    assert not set(specs.OPTIMIZERS) & set(specs.REFUSED_OPTIMIZERS)
    assert specs.check_optimizer("adamw_torch") is None
    assert specs.check_optimizer("lomo") == (
        "'lomo' is not supported: it updates weights during the backward pass, before gradients are accumulated and "
        "clipped",
        "use sgd, which keeps no state either",
    )
    unknown = specs.check_optimizer("adammax")
    assert unknown is not None and unknown[1] == "did you mean `adamax`?"


OWN = {"lr", "weight_decay", "betas", "eps", "fused", "foreach", "capturable", "differentiable", "maximize", "params"}


@pytest.mark.parametrize("name", specs.OPTIMIZERS)
def test_arguments_and_their_defaults_are_those_of_torch(name: str) -> None:
    spec = specs.OPTIMIZERS[name]
    of_torch = inspect.signature(getattr(torch.optim, spec.torch_class)).parameters
    for argument, field in spec.arguments.model_fields.items():
        assert field.default == of_torch[argument].default
    # Adam with a decoupled decay is adamw_torch.
    assert set(of_torch) - OWN - set(spec.arguments.model_fields) <= {"decoupled_weight_decay"}
    for argument in (
        OWN - set(spec.arguments.model_fields) - ({"betas", "eps"} if not spec.uses_adam_settings else set())
    ):
        ((key, what, fix),) = specs.check_optim_args(name, {argument: 1})
        assert (key, what) == (argument, f"'{argument}' cannot be set in optim_args") and fix


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("sgd", {"momentun": 0.9}, ("momentun", "sgd has no argument 'momentun'", "did you mean `momentum`?")),
        ("sgd", {"eps": 1}, ("eps", "sgd has no argument 'eps'", "it takes momentum, dampening, nesterov")),
        ("sgd", {"momentum": 2}, ("momentum", "expected a number, at least 0 and below 1; got 2", "")),
        ("sgd", {"nesterov": True}, ("nesterov", "Nesterov momentum needs a momentum and no dampening", "set momentum: 0.9 and no dampening")),
        ("sgd", {"dampening": 0.1}, ("dampening", "dampening has no effect without momentum", "set momentum, or remove dampening")),
        ("adamw_torch", {"amsgrad": "maybe"}, ("amsgrad", "expected true or false; got 'maybe'", "")),
        ("adamax", {"amsgrad": True}, ("amsgrad", "adamax has no argument 'amsgrad'", "remove it")),
    ],
)  # fmt: skip
def test_an_argument_that_the_optimizer_cannot_use_is_refused(
    name: str, args: dict[str, Any], problem: tuple[str, str, str]
) -> None:
    assert specs.check_optim_args(name, args) == [problem]


def test_adamw_is_fused_on_a_gpu_and_where_it_is_asked_for() -> None:
    def fused(name: str, device: str) -> bool | None:
        optimizer = build_optimizer(nn.Linear(2, 2), TrainSection(optim=name), torch.device(device))
        return optimizer.param_groups[0].get("fused")

    assert fused("adamw_torch", "cuda") and fused("adam", "cuda") and fused("adamw_torch_fused", "cpu")
    assert not fused("adamw_torch", "cpu") and not fused("sgd", "cuda")


def test_the_page_names_every_optimizer_schedule_and_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    names = {*specs.OPTIMIZERS, *specs.REFUSED_OPTIMIZERS, *SCHEDULES, *REFUSED_SCHEDULES}
    for arguments in (*(spec.arguments for spec in specs.OPTIMIZERS.values()), *SCHEDULES.values()):
        names |= set(arguments.model_fields)
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
