"""Which changes would free enough GPU memory? The cheapest first, each with the bytes it frees. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardtune.config.schema import RunConfig
from shardtune.terminal import size

_MARGIN = 0.02  # of the GPU: the next allocations are not known
_GROWING = ("activations", "loss")  # with the tokens of a micro-batch
_WANTS = {  # what an allocation is for, by the phase it happens in
    "forward": "activations", "loss": "loss", "backward": "activations", "evaluation": "activations",
    "optimizer": "optimizer", "loading": "weights",
}  # fmt: skip
_SHARDED = ("weights", "adapters", "gradients", "optimizer")
_CHECKPOINTING = "train.gradient_checkpointing"
# Results of products and attention as a share of all that a layer keeps otherwise (counts: docs/activations.md).
_PRODUCTS_SHARE = 0.7


@dataclass(frozen=True)
class Model:
    """What the arithmetic needs to know of it."""

    layers: int
    hidden: int
    weight_bytes: float  # a frozen weight takes, on average


@dataclass(frozen=True)
class Shortage:
    """What was in memory when it ran out, and how much was missing.

    Attributes:
        held: Bytes in use, by part.
        wanted: Bytes of the allocation that failed, while `free` were available.
        layers_done: Layers of the forward pass completed; None in other phases.
    """

    phase: str
    held: Mapping[str, int]
    wanted: int
    free: int
    capacity: int
    layers_done: int | None = None


@dataclass(frozen=True)
class Advice:
    """One change. `keeps`: the share of a part that is left after it."""

    setting: str
    value: str
    text: str
    keeps: Mapping[str, float]
    frees: int = 0

    def event(self) -> dict[str, Any]:
        return {"setting": self.setting, "value": self.value, "frees": self.frees, "text": self.text}


@dataclass(frozen=True)
class Answer:
    """`advice` in the order to try it: what is sufficient alone first, by its cost; `summary` says what is enough."""

    needed: int
    advice: tuple[Advice, ...]
    summary: str


def advise(short: Shortage, config: RunConfig, model: Model, processes: int) -> Answer:
    """Changes that help, by their cost, those that are sufficient alone first."""
    held = _projected(short, config, model)
    growth = sum(held.values()) - sum(short.held.values())
    needed = max(0, growth - short.free) + int(_MARGIN * short.capacity)

    def freed(*some: Advice) -> int:
        total = 0.0
        for part, count in held.items():
            # Of two values of one setting, the one that saves more.
            strongest: dict[str, float] = {}
            for one in some:
                strongest[one.setting] = min(strongest.get(one.setting, 1.0), one.keeps.get(part, 1.0))
            total += count * (1 - prod(strongest.values()))
        return int(total)

    found = _options(short, config, model, processes, needed, held)
    options = [Advice(**{**vars(one), "frees": freed(one)}) for one in found]
    useful = _without_half_measures([one for one in options if one.frees >= 0.01 * needed and one.frees > 0], needed)
    enough = [one for one in useful if one.frees >= needed]
    ordered = enough + [one for one in useful if one.frees < needed]
    return Answer(needed, tuple(ordered), _summary(enough, ordered, needed, freed))


def _projected(short: Shortage, config: RunConfig, model: Model) -> dict[str, int]:
    """What would have been held: with what was wanted, and in the middle of a forward pass, with the activations of
    the layers that were still to come."""
    held = dict(short.held)
    part = _WANTS.get(short.phase, "other")
    held[part] = held.get(part, 0) + short.wanted
    recomputed = config.train.gradient_checkpointing is True or short.phase == "evaluation"
    if short.layers_done is not None and not recomputed and short.layers_done < model.layers:
        held["activations"] = held.get("activations", 0) * model.layers // (short.layers_done + 1)
    return held


def _summary(enough: Sequence[Advice], ordered: Sequence[Advice], needed: int, freed: Callable[..., int]) -> str:
    if enough:
        return f"{size(needed)} more needed; the first change is enough."
    for count in range(2, len(ordered) + 1):
        if freed(*ordered[:count]) >= needed:
            return f"{size(needed)} more needed: no single change is enough, the first {count} together are."
    return (
        f"{size(needed)} more needed, but all of these together free {size(freed(*ordered))}: use more or larger GPUs, "
        "or a smaller model."
    )


def _options(
    short: Shortage, config: RunConfig, model: Model, processes: int, needed: int, held: Mapping[str, int]
) -> list[Advice]:
    """In the order of what they cost: nothing, speed, then what is trained, then machines."""
    phase = short.phase
    growing = sum(held.get(part, 0) for part in _GROWING)
    found: list[Advice | None] = [
        _smaller_batch(phase, config, growing, needed),
        _reshard(config, model),
        *_recompute(phase, config, model, held),
        _inputs_on_the_host(short, config, model, held),
        _fp8(config, model),
        _offload(config),
        _shorter(phase, config),
        _lower_rank(config),
        Advice(
            "parallel.nproc", str(2 * processes), f"Twice the GPUs ({2 * processes}): each holds half of every shard.",
            dict.fromkeys(_SHARDED, 0.5),
        ),
    ]  # fmt: skip
    return [one for one in found if one is not None]


def _smaller_batch(phase: str, config: RunConfig, growing: int, needed: int) -> Advice | None:
    train = config.train
    if phase == "evaluation":
        size_now = train.per_device_eval_batch_size
        if size_now == 1:
            return None
        sizes = list(range(size_now - 1, 0, -1))
        new = next((n for n in sizes if growing * (1 - n / size_now) >= needed), 1)
        text = f"Evaluate in batches of {new} instead of {size_now} (the same result)."
        return Advice("train.per_device_eval_batch_size", str(new), text, dict.fromkeys(_GROWING, new / size_now))
    size_now = train.per_device_train_batch_size
    if size_now == 1 or phase in ("loading", "optimizer"):
        return None
    sizes = [n for n in range(size_now - 1, 0, -1) if size_now % n == 0]
    new = next((n for n in sizes if growing * (1 - n / size_now) >= needed), 1)
    more = train.gradient_accumulation_steps * size_now // new
    text = (
        f"With train.gradient_accumulation_steps: {more} the effective batch stays the same; hardly slower while a "
        "micro-batch fills the GPU."
    )
    return Advice("train.per_device_train_batch_size", str(new), text, dict.fromkeys(_GROWING, new / size_now))


def _reshard(config: RunConfig, model: Model) -> Advice | None:
    if config.parallel.reshard_after_forward:
        return None
    kept = min(1.0, (1 + config.parallel.forward_prefetch) / max(1, model.layers))
    text = "Reshard a layer's weights after its forward pass; they are gathered a second time for backward."
    return Advice("parallel.reshard_after_forward", "true", text, {"gathered": kept})


def _recompute(phase: str, config: RunConfig, model: Model, held: Mapping[str, int]) -> list[Advice]:
    """What is cheap first, then all; where a layer keeps its products already, all."""
    now, activations = config.train.gradient_checkpointing, held.get("activations", 0)
    if now is True or phase in ("evaluation", "loading", "optimizer") or not activations:
        return []
    share = _PRODUCTS_SHARE if now == "selective" else 1.0
    kept = min(1.0, 1 / max(1, model.layers) / share + model.layers * _input_bytes(config, model) / activations)
    text = "Recompute whole layers in the backward pass: about a third more compute."
    full = Advice(_CHECKPOINTING, "full", text, {"activations": kept})
    if now == "selective":
        return [full]
    text = "Keep results of matrix products and attention; the rest of a layer is recomputed, which is cheap."
    return [Advice(_CHECKPOINTING, "selective", text, {"activations": _PRODUCTS_SHARE}), full]


def _input_bytes(config: RunConfig, model: Model) -> int:
    """Of one layer, in bf16."""
    return config.train.per_device_train_batch_size * config.data.max_length * model.hidden * 2


def _inputs_on_the_host(short: Shortage, config: RunConfig, model: Model, held: Mapping[str, int]) -> Advice | None:
    """Where a layer keeps nothing but its input: all inputs but the three that are used or on their way."""
    train, activations = config.train, held.get("activations", 0)
    if train.gradient_checkpointing is not True or train.offload_activations or not activations:
        return None
    if short.phase not in ("forward", "loss", "backward"):
        return None
    there = model.layers if short.layers_done is None else short.layers_done
    kept = 1 - min(1.0, max(0, there - 3) * _input_bytes(config, model) / activations)
    text = "Keep the layers' inputs in host memory until the backward pass; they are copied while layers compute."
    return Advice("train.offload_activations", "true", text, {"activations": kept})


def _without_half_measures(useful: list[Advice], needed: int) -> list[Advice]:
    """A value that is not enough gives way to another one of the same setting that frees more."""
    most = {
        setting: max(one.frees for one in useful if one.setting == setting) for setting in {u.setting for u in useful}
    }
    return [one for one in useful if one.frees >= needed or one.frees == most[one.setting]]


def _fp8(config: RunConfig, model: Model) -> Advice | None:
    if config.model.base_precision == "fp8" or model.weight_bytes <= 1.1:
        return None
    text = "Store the frozen weights in one byte each; they are dequantised layer by layer, and rounded once."
    kept = 1 / model.weight_bytes
    return Advice("model.base_precision", "fp8", text, {"weights": kept, "gathered": kept})


def _offload(config: RunConfig) -> Advice | None:
    if config.parallel.offload_params:
        return None
    text = "Keep shards, gradients and optimizer state in host memory: every step waits for PCIe transfers."
    return Advice("parallel.offload_params", "true", text, dict.fromkeys(_SHARDED, 0.0))


def _shorter(phase: str, config: RunConfig) -> Advice | None:
    if phase in ("loading", "optimizer") or config.data.max_length < 64:
        return None
    half = config.data.max_length // 2
    text = "Rows of half the length: longer ones are truncated (data.long_rows), which changes the training data."
    return Advice("data.max_length", str(half), text, dict.fromkeys(_GROWING, 0.5))


def _lower_rank(config: RunConfig) -> Advice | None:
    if config.lora.r < 4:
        return None
    half = config.lora.r // 2
    text = "Adapters of half the rank, with their gradients and optimizer state: this changes what is trained."
    return Advice("lora.r", str(half), text, dict.fromkeys(("adapters", "gradients", "optimizer"), 0.5))
