"""Run on ranks by test_optimizers.py: the same gradients for our optimizers and torch's; each rank writes what it saw.

Beside torch's class on the same shards, torch's class on whole tensors, and ours that goes on from the state that the
number of ranks before this one has saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shards_worker import WholeTensors, same, sharded, shards
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.checkpoint.adapter import gather_tensors, shard_like
from shardtune.checkpoint.optimizer import gather_optimizer, load_optimizer
from shardtune.config.optimizers import OPTIMIZERS
from shardtune.config.schema import ParallelSection, TrainSection
from shardtune.parallel.processes import Processes, join
from shardtune.train.optimizers import build_optimizer
from shardtune.train.shards import local_shard

STEPS, SAVED = 9, 4  # RAdam takes another branch from its sixth step on
# By name: train.optim and train.optim_args.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_torch": ("adamw_torch", {}),
    "adamw_torch_fused": ("adamw_torch_fused", {}),
    "adamw amsgrad": ("adamw_torch", {"amsgrad": True}),
    "sgd": ("sgd", {}),
    "sgd momentum": ("sgd", {"momentum": 0.9, "dampening": 0.25}),
    "sgd nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "adam": ("adam", {}),
    "adamax": ("adamax", {}),
    "nadam": ("nadam", {}),
    "nadam decoupled": ("nadam", {"decoupled_weight_decay": True, "momentum_decay": 0.01}),
    "radam": ("radam", {}),
    "radam decoupled": ("radam", {"decoupled_weight_decay": True}),
    "rmsprop": ("rmsprop", {}),
    "rmsprop centered": ("rmsprop", {"centered": True, "momentum": 0.5, "alpha": 0.9, "eps": 1e-6}),
    "adagrad": ("adagrad", {}),
    "adagrad decayed": ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-8}),
    "adadelta": ("adadelta", {"rho": 0.8}),
}
FAST = ("adamw_torch", "adamw_torch_fused", "sgd momentum")


def whole_model() -> nn.Sequential:
    """What `sharded` shards, in one piece. No unused parameter: the state of each must be there to be saved."""
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)])


def section(name: str) -> TrainSection:
    optim, args = CASES[name]
    return TrainSection(
        optim=optim, optim_args=args, learning_rate=0.05, weight_decay=0.2,
        adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6,
    )  # fmt: skip


def torchs(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer as one would write it with torch: biases are not decayed."""
    train, spec = section(name), OPTIMIZERS[CASES[name][0]]
    settings: dict[str, Any] = {"lr": train.learning_rate, **train.optim_args}
    if spec.uses_adam_settings:
        settings |= {"betas": (0.8, 0.95), "eps": 1e-6}
    if name == "adamw_torch_fused":
        settings["fused"] = True
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.2}, {"params": biases, "weight_decay": 0.0}]
    kind = getattr(torch.optim, spec.torch_class)
    return kind(groups, **settings)  # type: ignore[no-any-return]


def give_gradients(model: nn.Module, seed: int) -> None:
    """Drawn from `seed`: the same however the model is sharded."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (seed % 3 - 2)
        parameter.grad = shard_like(gradient, parameter)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> int:
    """Returns how often torch had to think about a sharded tensor as a whole."""
    give_gradients(model, seed)
    with WholeTensors() as seen:
        optimizer.step()
    return seen.count


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    return gather_tensors(model.named_parameters(), keep=True)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance) for name in one
    )


def prove(processes: Processes, name: str, folder: Path) -> dict[str, bool]:
    ours, twin, plain = sharded(processes, unused=False), sharded(processes, unused=False), whole_model()
    optimizer = build_optimizer(ours, section(name), processes.device)
    stock, reference = torchs(name, twin), torchs(name, plain)
    begin, file = gathered(ours), folder / f"{name}.safetensors"
    before = load_file(file) if file.exists() else {}
    thoughts, saved = 0, {}
    for seed in range(STEPS):
        if seed == SAVED:
            saved = {**gathered(ours), **gather_optimizer(ours, optimizer, keep=True)}
        count = step(ours, optimizer, seed)
        thoughts += count if seed > 0 else 0  # in the first step the state is made
        step(twin, stock, seed)
        step(plain, reference, seed)
    # torch's fused kernel for CPUs rounds what is left over at the end of a vector otherwise than the rest.
    tolerance = 1e-6 if name == "adamw_torch_fused" else 0.0
    found = {
        "moved": not equal(begin, gathered(ours)),
        "as torch on shards": same(shards(ours), shards(twin)),
        "as torch unsharded": equal(gathered(ours), gathered(plain), tolerance),
        "on shards": thoughts == 0,
        "state": same_state(optimizer, stock),
        "resumed": equal(resumed(processes, name, saved), gathered(ours)),
    }
    if before:
        found["saved by other ranks"] = equal(before, saved, tolerance)
        found["resumed on other ranks"] = equal(resumed(processes, name, before), gathered(ours), tolerance)
    if processes.rank == 0:
        save_file(saved, file)
    return found


def same_state(ours: torch.optim.Optimizer, stock: torch.optim.Optimizer) -> bool:
    one, other = ours.state_dict()["state"], stock.state_dict()["state"]
    return one.keys() == other.keys() and all(
        one[number].keys() == state.keys()
        and all(
            type(one[number][key]) is type(value)
            and (not isinstance(value, torch.Tensor) or torch.equal(local_shard(one[number][key]), local_shard(value)))
            and (not isinstance(value, DTensor) or one[number][key].placements == value.placements)
            for key, value in state.items()
        )
        for number, state in other.items()
    )


def resumed(processes: Processes, name: str, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = sharded(processes, unused=False)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            parameter.copy_(shard_like(saved[label], parameter))
    optimizer = build_optimizer(model, section(name), processes.device)
    load_optimizer(model, optimizer, {label: value for label, value in saved.items() if "/" in label})
    for seed in range(SAVED, STEPS):
        step(model, optimizer, seed)
    return gathered(model)


def main(out: str, *names: str) -> None:
    with join(ParallelSection(device="cpu")) as processes:
        seen = {name: prove(processes, name, Path(out)) for name in names}
        (Path(out) / f"rank{processes.rank}of{processes.world_size}.json").write_text(json.dumps(seen))
