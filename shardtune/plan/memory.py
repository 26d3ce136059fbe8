"""How many bytes does a GPU need at the peak of a step? Part by part, at the moment when they are most together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING

from shardtune.plan import activations
from shardtune.plan.activations import Bytes, KnownBy, LayerActivations, Mode

if TYPE_CHECKING:
    from shardtune.plan.facts import Facts, LayerKind
    from shardtune.plan.work import Work

_CUDA_CONTEXT = 600 << 20  # of a process: driver, kernels, cuBLAS workspaces
_NCCL = 400 << 20  # of a process with others: channels' buffers, which NCCL allocates by itself
_FRAGMENTED = 0.03  # of what comes and goes in a step: blocks that the allocator holds and cannot use
_USABLE = {"cuda": 0.97, "cpu": 0.8}  # of what there is: others on the machine, and what the arithmetic does not see
_PYTHON = 1 << 30  # on a CPU: the interpreter and its libraries
_LOSS_CHUNK = 512 << 20  # bytes of logits at a time, `kernels.cross_entropy`
_LOGIT_EAGER = 22  # bytes for each logit where the loss is not fused: values, log-probabilities, statistics
_LOGIT_CPU = 14  # beside the value, where no kernel takes the loss in place
_ONE_UNIT = 2**30  # `parallel.shard`: adapters up to this size are gathered all at once
_ON_DEVICE = 3  # offloaded inputs that are on the device at a time
_BATCH = 64  # bytes for each token: ids, positions, targets
_MASTER = _GRADIENT = 4  # adapters and their gradients are float32


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on one GPU at the peak of a step, by part.

    Attributes:
        weights: The frozen base, as far as this rank holds it.
        gathered: Weights of others that are there for now, and adapters in the dtype they are computed with.
        activations: Kept for the backward pass.
        working: What comes and goes at the peak: gradients of activations, dequantised weights.
        communication: Buffers of collectives that torch allocates.
        context: What torch does not allocate (CUDA, NCCL), and what its allocator cannot use.
        known_by: How the activations are known.
        moment: When the peak is.
    """

    weights: int
    gathered: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    loss: int
    communication: int
    context: int
    known_by: KnownBy
    moment: str

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` will say."""
        return sum(self.parts().values()) - self.context

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


def gpu_memory(facts: Facts, work: Work, traced: Sequence[LayerActivations] = ()) -> GpuMemory:
    """The peak of a training step, or of an evaluation where that needs more.

    Args:
        traced: What a trace of this very model found for each kind of layer, to go by instead of the table.
    """
    found = [_Layer(facts, kind, work, own) for kind, own in zip_longest(facts.kinds, traced)]
    held = _Held.of(facts, work)
    moments = list(_training(facts, work, held, found))
    if work.eval_batch:
        moments.append(_evaluation(facts, work, held, found))
    peak = max(moments, key=lambda one: one.allocated)
    passing = peak.activations + peak.working + peak.loss + peak.gathered
    return replace(peak, context=_context(facts, passing), known_by=_least_sure(found))


def usable(memory: int, device: str) -> int:
    """Of a GPU's memory (on a CPU: of a rank's part of the host's), what a run may fill."""
    return int(memory * _USABLE[device])


def _context(facts: Facts, passing: int) -> int:
    if facts.machine.device == "cpu":
        return _PYTHON
    return _CUDA_CONTEXT + (_NCCL if facts.machine.world_size > 1 else 0) + int(_FRAGMENTED * passing)


class _Layer:
    """What a layer of one kind keeps and needs, in bytes."""

    def __init__(self, facts: Facts, kind: LayerKind, work: Work, traced: LayerActivations | None) -> None:
        mode: Mode = "selective" if work.checkpointing == "selective" else "none"
        found, known_by = activations.layer_activations(facts, kind, work, mode)
        self.kind, self.known_by = kind, "traced" if traced else known_by
        self._facts, self._work, self._found = facts, work, traced or found
        self._sizes = activations.dimensions(facts.model, kind)
        self._scale = work.value_bytes / 2  # the table is made in bf16
        self.input = work.tokens * facts.hidden * work.value_bytes
        self.kept = self._count(self._found.kept, work.tokens)

    def training(self) -> int:
        """At the peak of its two passes, with what it keeps."""
        return self._most(self._found, self._work.tokens)

    def evaluation(self) -> int:
        found, _ = activations.layer_activations(self._facts, self.kind, self._work, "evaluation")
        return self._most(found, self._work.eval_batch * self._work.length)

    def _count(self, some: Bytes, tokens: int) -> int:
        return int(some.count(self._sizes, tokens) * self._scale)

    def _most(self, found: LayerActivations, tokens: int) -> int:
        return max(
            self._count(one.alive, tokens) + self._workspace(activations.numel(one.weight, self._sizes), tokens)
            for one in found.moments
        )

    def _workspace(self, weight: int, tokens: int) -> int:
        """What a product with a weight in float8 allocates: the weight as values; or transposed, with rounded rows."""
        if not self._work.fp8 or not weight:
            return 0
        experts = self._sizes.get("experts", 0)
        routed = experts > 0 and weight % experts == 0 and weight >= experts * self._facts.hidden
        in_blocks = "weight_block_size" in self._facts.model.get("quantization_config", {})
        if not self._work.fp8_compute or (routed and in_blocks):
            return weight * self._work.value_bytes
        if routed:
            rows = tokens * self._sizes["top_k"]
            return weight + rows * max(self._facts.hidden, 2 * self._sizes["expert_width"])
        return weight + tokens * (weight // self._facts.hidden)


def _least_sure(found: list[_Layer]) -> KnownBy:
    known = {layer.known_by for layer in found}
    return "estimated" if "estimated" in known else "traced" if "traced" in known else "table"


@dataclass(frozen=True)
class _Held:
    """What is there in every moment of a step, and how adapters' gradients come about."""

    base: GpuMemory
    trained: int  # parameters
    shards: int  # over which these and their state are divided
    one_unit: bool
    reduce_bytes: int
    computed: int  # bytes of a value

    @staticmethod
    def of(facts: Facts, work: Work) -> _Held:
        world, offloaded = facts.machine.world_size, work.offload_params and facts.machine.device == "cuda"
        over = world if work.shards == 1 and not offloaded else work.shards
        in_layers = [weight_bytes(facts, kind, work) for kind in facts.kinds]
        root = facts.value_bytes * sum(map(prod, facts.root.values()))
        whole = root + sum(kind.count * size for kind, size in zip(facts.kinds, in_layers, strict=True))
        # With one rank FSDP2 leaves frozen weights alone, unless they have to be cast or fetched.
        managed = work.shards > 1 or offloaded or facts.value_bytes != work.value_bytes
        per_value = work.value_bytes / facts.value_bytes
        one_unit = not managed and _MASTER * facts.trained <= _ONE_UNIT
        layers = max(1, facts.layers)
        units = layers if one_unit or not work.reshard else min(layers, 1 + work.prefetch)
        gathered = work.value_bytes * facts.trained * units // layers
        communication = 0
        if managed:
            layer, rest = int(max(in_layers, default=0) * per_value), int(root * per_value)
            gathered += rest + (layer * units if work.reshard else int((whole - root) * per_value))
            communication = layer
        if world > 1 and not one_unit:
            communication += work.reduce_bytes * facts.trained // layers
        own = 0 if offloaded else 1
        base = GpuMemory(
            weights=own * whole // work.shards,
            gathered=gathered,
            adapters=own * _MASTER * facts.trained // over,
            gradients=0,
            optimizer=own * work.optimizer_bytes * facts.trained // over,
            activations=0,
            working=0,
            loss=0,
            communication=communication,
            context=0,
            known_by="table",
            moment="",
        )
        return _Held(base, facts.trained * own, over, one_unit, work.reduce_bytes, work.value_bytes)

    def between_micro_batches(self, work: Work, world: int) -> int:
        """Gradients of earlier micro-batches: whole where they are reduced once a step, else this rank's shard."""
        if work.accumulation == 1:
            return 0
        return _GRADIENT * self.trained // (1 if world > 1 else self.shards)


def _training(facts: Facts, work: Work, held: _Held, found: list[_Layer]) -> Iterator[GpuMemory]:
    """The moments of a step that can be its peak."""
    tokens, hidden = work.tokens, facts.hidden * work.value_bytes * work.tokens
    earlier = held.between_micro_batches(work, facts.machine.world_size)
    shared = tokens * (_BATCH + 2 * work.value_bytes * _rotary(facts))
    recomputed = work.checkpointing == "full"
    kept = sum(layer.kind.count * (layer.input if recomputed else layer.kept) for layer in found)
    if recomputed and work.offload_activations:
        kept = min(facts.layers, _ON_DEVICE) * hidden
    base = replace(held.base, gradients=earlier, activations=kept + shared)
    norm, sizes, scale = activations.final_norm(facts), {"hidden": facts.hidden}, work.value_bytes / 2
    kept_by_norm = int(norm.kept.count(sizes, tokens) * scale)
    yield replace(base, loss=kept_by_norm + 2 * hidden + _logits(facts, work, tokens), moment="loss")
    by_norm = max(int(one.alive.count(sizes, tokens) * scale) for one in norm.moments)
    yield replace(base, loss=by_norm, moment="backward pass of the final norm")
    working = max(layer.training() - (layer.input if recomputed else layer.kept) for layer in found)
    yield replace(base, working=working, moment="backward pass of the last layer")
    # What is kept is gone by the first layer; the others' gradients are there.
    per_value = held.computed if held.one_unit else _GRADIENT
    reached = earlier + per_value * held.trained // (1 if held.one_unit else held.shards)
    first = max(layer.training() for layer in found)
    yield replace(base, activations=shared, working=first, gradients=reached, moment="backward pass of the first layer")
    if held.one_unit:
        buffers = (held.reduce_bytes + _GRADIENT) * held.trained
        yield replace(base, activations=shared, gradients=reached, communication=buffers, moment="gradient reduction")
    own = _GRADIENT * held.trained // held.shards
    yield replace(base, activations=0, gradients=own, working=own, moment="optimizer step")


def _evaluation(facts: Facts, work: Work, held: _Held, found: list[_Layer]) -> GpuMemory:
    """The largest layer, or the loss: nothing is kept."""
    tokens = work.eval_batch * work.length
    hidden = facts.hidden * work.value_bytes * tokens
    shared = tokens * (_BATCH + 2 * work.value_bytes * _rotary(facts))
    layer, loss = max(one.evaluation() for one in found), 2 * hidden + _logits(facts, work, tokens)
    peak = replace(held.base, activations=shared, moment="evaluation")
    return replace(peak, working=layer) if layer >= loss else replace(peak, loss=loss)


def _logits(facts: Facts, work: Work, tokens: int) -> int:
    """Of head and loss: all logits, or those of a chunk with the hidden states they are made of and their gradient."""
    if not work.fused_loss:
        return tokens * facts.vocabulary * _LOGIT_EAGER
    per_row = facts.vocabulary * work.value_bytes
    rows = min(tokens, -(-_LOSS_CHUNK // (per_row * 128)) * 128)
    on_cpu = _LOGIT_CPU * facts.vocabulary if facts.machine.device == "cpu" else 0
    return rows * (per_row + on_cpu + 2 * facts.hidden * work.value_bytes)


def _rotary(facts: Facts) -> int:
    model = facts.model
    heads = int(model.get("num_attention_heads") or 1)
    return int(model.get("qk_rope_head_dim") or model.get("head_dim") or facts.hidden // heads)


def weight_bytes(facts: Facts, kind: LayerKind, work: Work) -> int:
    """Of one layer of the frozen base as it is held; in float8 with scales, one for each row unless the checkpoint has
    larger blocks."""
    total = 0
    for name, shape in kind.parameters.items():
        if not work.fp8 or name not in fp8_weights(kind):
            total += prod(shape) * facts.value_bytes
        else:
            total += prod(shape) + (0 if kind.quantised else 4 * prod(shape[:-1]))
    return total


def fp8_weights(kind: LayerKind) -> frozenset[str]:
    """Which weights of a layer are held in float8: those the checkpoint stores so; of others, all matrices but what
    scores experts (`model.quantized.fp8_candidates`)."""
    if kind.quantised:
        return kind.quantised
    experts = max((shape[0] for shape in kind.parameters.values() if len(shape) == 3), default=0)
    return frozenset(
        name
        for name, shape in kind.parameters.items()
        if len(shape) == 3 or (len(shape) == 2 and name.endswith("weight") and shape[0] > experts)
    )
