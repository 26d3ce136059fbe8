"""Which settings would free enough GPU memory? The cheapest changes first, each with the bytes it frees. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardtune.config.schema import RunConfig
from shardtune.terminal import size

_MARGIN = 0.02  # of the GPU: the next allocation is not known
_PER_TOKEN_PARTS = ("activations", "loss")  # with the tokens of a micro-batch
_PART_OF_PHASE = {  # what an allocation is for, by the phase it happens in
    "forward": "activations", "loss": "loss", "backward": "activations", "evaluation": "activations",
    "optimizer": "optimizer", "loading": "weights",
}  # fmt: skip
_SHARDED = ("weights", "adapters", "gradients", "optimizer")
_TRAINED = ("adapters", "gradients", "optimizer")
_CHECKPOINTING = "train.gradient_checkpointing"
# Share of matrix products and attention in the activations that a layer keeps (docs/activations.md has the counts).
_PRODUCTS_SHARE = 0.7


@dataclass(frozen=True)
class ModelFacts:
    """What the arithmetic needs to know about the model."""

    layers: int
    hidden: int
    weight_bytes: float  # per frozen weight, on average


@dataclass(frozen=True)
class Shortage:
    """What was in memory when it ran out, and how much was missing.

    Attributes:
        held: Bytes by part.
        wanted: Bytes of the allocation that failed.
        layers_done: Layers completed in the forward pass; None outside of one.
    """

    phase: str
    held: Mapping[str, int]
    wanted: int
    free: int
    capacity: int
    layers_done: int | None = None


@dataclass(frozen=True)
class Change:
    """One change of a setting. `keeps`: the share of a part that remains after it."""

    setting: str
    value: str
    text: str
    keeps: Mapping[str, float]
    frees: int = 0

    def event(self) -> dict[str, Any]:
        return {"setting": self.setting, "value": self.value, "frees": self.frees, "text": self.text}


@dataclass(frozen=True)
class MemoryAdvice:
    """`advice` in the order to try: changes that are enough on their own first, by cost; `verdict` sums it up."""

    needed: int
    advice: tuple[Change, ...]
    verdict: str


def advise(short: Shortage, config: RunConfig, model: ModelFacts, processes: int) -> MemoryAdvice:
    """Changes that help, by cost, those that are enough on their own first."""
    held = _projected(short, config, model)
    growth = sum(held.values()) - sum(short.held.values())
    needed = max(0, growth - short.free) + int(_MARGIN * short.capacity)

    def freed(*some: Change) -> int:
        total = 0.0
        for part, count in held.items():
            # Of two values of one setting, the one that saves more.
            strongest: dict[str, float] = {}
            for one in some:
                strongest[one.setting] = min(strongest.get(one.setting, 1.0), one.keeps.get(part, 1.0))
            total += count * (1 - prod(strongest.values()))
        return int(total)

    found = _options(short, config, model, processes, needed, held)
    options = [Change(**{**vars(one), "frees": freed(one)}) for one in found]
    useful = _drop_insufficient([one for one in options if one.frees >= 0.01 * needed and one.frees > 0], needed)
    enough = [one for one in useful if one.frees >= needed]
    ordered = enough + [one for one in useful if one.frees < needed]
    return MemoryAdvice(needed, tuple(ordered), _verdict(enough, ordered, needed, freed))


def _projected(short: Shortage, config: RunConfig, model: ModelFacts) -> dict[str, int]:
    """What would have been in memory: with the failed allocation, and during a forward pass, with the activations of
    the remaining layers."""
    held = dict(short.held)
    part = _PART_OF_PHASE.get(short.phase, "other")
    held[part] = held.get(part, 0) + short.wanted
    recomputed = config.train.gradient_checkpointing is True or short.phase == "evaluation"
    if short.layers_done is not None and not recomputed and short.layers_done < model.layers:
        held["activations"] = held.get("activations", 0) * model.layers // (short.layers_done + 1)
    return held


def _verdict(enough: Sequence[Change], ordered: Sequence[Change], needed: int, freed: Callable[..., int]) -> str:
    if enough:
        return f"{size(needed)} more is needed; the first change alone is enough."
    for count in range(2, len(ordered) + 1):
        if freed(*ordered[:count]) >= needed:
            return f"{size(needed)} more is needed: no single change is enough, but the first {count} together are."
    return (
        f"{size(needed)} more is needed, but all of these together free only {size(freed(*ordered))}: use more or "
        "larger GPUs, or a smaller model."
    )


def _options(
    short: Shortage, config: RunConfig, model: ModelFacts, processes: int, needed: int, held: Mapping[str, int]
) -> list[Change]:
    """By cost: nothing, speed, then what is trained, then machines."""
    phase = short.phase
    growing = sum(held.get(part, 0) for part in _PER_TOKEN_PARTS)
    found: list[Change | None] = [
        _smaller_batch(phase, config, growing, needed),
        _reshard(config, model),
        _shard_further(config, processes),
        *_recompute(phase, config, model, held),
        _offload_inputs(short, config, model, held),
        _fp8(config, model),
        _offload(config),
        _shorter(phase, config),
        _lower_rank(config),
        _more_gpus(config, processes),
    ]
    return [one for one in found if one is not None]


def _smaller_batch(phase: str, config: RunConfig, growing: int, needed: int) -> Change | None:
    train = config.train
    if phase == "evaluation":
        size_now = train.per_device_eval_batch_size
        if size_now == 1:
            return None
        sizes = list(range(size_now - 1, 0, -1))
        new = next((n for n in sizes if growing * (1 - n / size_now) >= needed), 1)
        text = f"Evaluate in batches of {new} instead of {size_now} (same result)."
        return Change(
            "train.per_device_eval_batch_size", str(new), text, dict.fromkeys(_PER_TOKEN_PARTS, new / size_now)
        )
    size_now = train.micro_batch
    if size_now == 1 or phase in ("loading", "optimizer"):
        return None
    sizes = [n for n in range(size_now - 1, 0, -1) if size_now % n == 0]
    new = next((n for n in sizes if growing * (1 - n / size_now) >= needed), 1)
    more = train.accumulation * size_now // new
    text = (
        f"With train.gradient_accumulation_steps: {more} the effective batch size is the same; little slower as long "
        "as a micro-batch keeps the GPU busy."
    )
    return Change("train.per_device_train_batch_size", str(new), text, dict.fromkeys(_PER_TOKEN_PARTS, new / size_now))


def _reshard(config: RunConfig, model: ModelFacts) -> Change | None:
    if config.parallel.reshard_after_forward:
        return None
    kept = min(1.0, (1 + config.parallel.forward_prefetch) / max(1, model.layers))
    text = "Reshard each layer after its forward pass; its weights are gathered again for the backward pass."
    return Change("parallel.reshard_after_forward", "true", text, {"gathered": kept})


def _ranks_of_a_replica(config: RunConfig, processes: int) -> int:
    parallel = config.parallel
    return {"replicate": 1, "hybrid": parallel.shard_size or processes}.get(parallel.shard, processes)


def _shard_further(config: RunConfig, processes: int) -> Change | None:
    shards = _ranks_of_a_replica(config, processes)
    if shards >= processes:
        return None
    text = f"Shard the frozen base over all {processes} processes: each layer is gathered for every micro-batch."
    return Change("parallel.shard", "full", text, {"weights": shards / processes})


def _more_gpus(config: RunConfig, processes: int) -> Change | None:
    """Only what is sharded over all of them shrinks."""
    text = f"Twice the GPUs ({2 * processes}): each has half of every shard."
    if _ranks_of_a_replica(config, processes) == processes:
        return Change("parallel.nproc", str(2 * processes), text, dict.fromkeys(_SHARDED, 0.5))
    if config.parallel.shard == "replicate":
        return Change("parallel.nproc", str(2 * processes), text, dict.fromkeys(_TRAINED, 0.5))
    return None


def _recompute(phase: str, config: RunConfig, model: ModelFacts, held: Mapping[str, int]) -> list[Change]:
    """Selective checkpointing first, then full; where it is selective already, full."""
    now, activations = config.train.gradient_checkpointing, held.get("activations", 0)
    if now is True or phase in ("evaluation", "loading", "optimizer") or not activations:
        return []
    share = _PRODUCTS_SHARE if now == "selective" else 1.0
    kept = min(1.0, 1 / max(1, model.layers) / share + model.layers * _input_bytes(config, model) / activations)
    text = "Full activation checkpointing: layers are recomputed in the backward pass, about a third more compute."
    full = Change(_CHECKPOINTING, "full", text, {"activations": kept})
    if now == "selective":
        return [full]
    text = "Selective activation checkpointing: keep the results of matrix products and attention, recompute the rest."
    return [Change(_CHECKPOINTING, "selective", text, {"activations": _PRODUCTS_SHARE}), full]


def _input_bytes(config: RunConfig, model: ModelFacts) -> int:
    """Of one layer, in bf16."""
    return config.train.micro_batch * config.data.max_length * model.hidden * 2


def _offload_inputs(short: Shortage, config: RunConfig, model: ModelFacts, held: Mapping[str, int]) -> Change | None:
    """Where layers keep only their input: all inputs but the three that are in use or in transit."""
    train, activations = config.train, held.get("activations", 0)
    if train.gradient_checkpointing is not True or train.offload_activations or not activations:
        return None
    if short.phase not in ("forward", "loss", "backward"):
        return None
    there = model.layers if short.layers_done is None else short.layers_done
    kept = 1 - min(1.0, max(0, there - 3) * _input_bytes(config, model) / activations)
    text = "Offload the layers' inputs to host memory until the backward pass; copies overlap with compute."
    return Change("train.offload_activations", "true", text, {"activations": kept})


def _drop_insufficient(useful: list[Change], needed: int) -> list[Change]:
    """Drop a value that is not enough if another value of the same setting frees more."""
    most = {
        setting: max(one.frees for one in useful if one.setting == setting) for setting in {u.setting for u in useful}
    }
    return [one for one in useful if one.frees >= needed or one.frees == most[one.setting]]


def _fp8(config: RunConfig, model: ModelFacts) -> Change | None:
    if config.model.base_precision == "fp8" or model.weight_bytes <= 1.1:
        return None
    text = "Store the frozen weights in FP8 (one byte each), dequantized layer by layer; they are rounded once."
    kept = 1 / model.weight_bytes
    return Change("model.base_precision", "fp8", text, {"weights": kept, "gathered": kept})


def _offload(config: RunConfig) -> Change | None:
    if config.parallel.offload_params:
        return None
    text = "Keep shards, gradients and optimizer state in host memory: every step waits for PCIe transfers."
    return Change("parallel.offload_params", "true", text, dict.fromkeys(_SHARDED, 0.0))


def _shorter(phase: str, config: RunConfig) -> Change | None:
    if phase in ("loading", "optimizer") or config.data.max_length < 64:
        return None
    half = config.data.max_length // 2
    text = "Half the maximum length: longer rows are handled by data.long_rows, which changes the training data."
    return Change("data.max_length", str(half), text, dict.fromkeys(_PER_TOKEN_PARTS, 0.5))


def _lower_rank(config: RunConfig) -> Change | None:
    if config.lora.r < 4:
        return None
    half = config.lora.r // 2
    text = "Half the LoRA rank, with its gradients and optimizer state: this changes what is trained."
    return Change("lora.r", str(half), text, dict.fromkeys(_TRAINED, 0.5))
