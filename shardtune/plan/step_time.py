"""How long does an optimizer step take, and how does that change with more nodes?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from shardtune.plan.catalogue import Cluster, Gpu
from shardtune.plan.communication import Communication, communication
from shardtune.plan.facts import Facts
from shardtune.plan.layer_cost import Passes, layer_passes, matmul_rate
from shardtune.plan.work import Work

# Per trained parameter: value, gradient and two moments are read, three of them written; the norm; a copy in bf16.
_OPTIMIZER_BYTES = 50
_HOST_BANDWIDTH = 20e9  # of the host's memory, for an optimizer that runs there
_FUSED_LOGIT_BYTES, _PLAIN_LOGIT_BYTES = 5, 16  # times a value's: logits and their gradients read and written
_FP8_EXPERTS_LAUNCHES = 3.4  # of one measured run: experts' rows are rounded and products launched by the host
_EAGER_LAUNCHES = 1.3  # an uncompiled layer starts more kernels
NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on the slowest path, by what they are spent on.

    Attributes:
        products: Products with the frozen weights of the layers, recomputed ones too.
        elementwise: Norms, rotary embeddings, activation functions, routing, rounding to FP8: limited by memory.
        adapters: Products of low rank, limited by memory too.
        dequantise: Float8 weights written out for a product.
        head: Output head and loss.
        launches: What the device waits for the host that launches its kernels.
        communication: Of collectives, hidden or not.
        exposed: What of it nothing hides.
        offload: Copies to and from host memory that nothing hides.
        tokens: Real ones, of all ranks.
    """

    products: float
    attention: float
    elementwise: float
    adapters: float
    dequantise: float
    head: float
    optimizer: float
    launches: float
    communication: float
    exposed: float
    offload: float
    tokens: float

    @property
    def compute(self) -> float:
        """Seconds that the device computes, or waits for the host."""
        kernels = self.products + self.attention + self.elementwise + self.adapters + self.dequantise
        return kernels + self.head + self.optimizer + self.launches

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.offload

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def step_time(facts: Facts, work: Work, cluster: Cluster) -> StepTime:
    """Of a step in which every rank does this work."""
    gpu, tokens = cluster.gpu, computed_tokens(work)
    layers = sum((layer_passes(facts, kind, work, gpu, tokens) * kind.count for kind in facts.kinds), Passes())
    head = _head_seconds(facts, work, gpu, tokens)
    kernels = layers.forward.seconds + layers.backward.seconds + head
    launches = max(0.0, _host_seconds(facts, work, gpu) - kernels)
    # Where the device waits for the host, it waits in both passes.
    slower = 1 + launches / kernels
    links = communication(facts, work, cluster)
    exposed, offload = _exposed(
        facts, work, cluster, links, layers.forward.seconds * slower, layers.backward.seconds * slower
    )
    times = work.accumulation
    parts = (layers.forward + layers.backward) * times
    return StepTime(
        products=parts.products,
        attention=parts.attention,
        elementwise=parts.elementwise,
        adapters=parts.adapters,
        dequantise=parts.dequantise,
        head=head * times,
        optimizer=_optimizer_seconds(facts, work, cluster),
        launches=launches * times,
        communication=_total(links, work),
        exposed=exposed,
        offload=offload,
        tokens=cluster.world_size * times * work.tokens * work.fill,
    )


def evaluation_seconds(facts: Facts, work: Work, cluster: Cluster) -> float:
    """Of one micro-batch that is scored and not trained on."""
    tokens, once = computed_tokens(work), replace(work, accumulation=1)
    forward = sum(
        layer_passes(facts, kind, once, cluster.gpu, tokens).forward.seconds * kind.count for kind in facts.kinds
    )
    links, host = communication(facts, once, cluster), facts.layers * cluster.gpu.host_forward_ms * 1e-3
    head = _head_seconds(facts, once, cluster.gpu, tokens) / 2
    return max(forward + head, host, links.layers, links.copies) + links.root


def computed_tokens(work: Work) -> float:
    """Of a micro-batch on average, with its padding.

    Packed rows, and rows that are nearly full, are padded to their whole length. Others are padded to the longest of
    their batch: with lengths as instruction data has them, 1.8 times the average of four, 2.2 times that of eight.
    """
    if work.packed or work.fill >= 0.95:
        return work.tokens
    return work.tokens * min(1.0, work.fill * (1 + 0.6 * log(work.batch)))


def _head_seconds(facts: Facts, work: Work, gpu: Gpu, tokens: float) -> float:
    """Forward and the gradient of its input; the fused loss takes the real tokens only."""
    scored = work.tokens * work.fill if work.fused_loss else tokens
    moved = (_FUSED_LOGIT_BYTES if work.fused_loss else _PLAIN_LOGIT_BYTES) * work.value_bytes
    multiplied = 4 * facts.hidden * facts.vocabulary / matmul_rate(work, gpu)
    return scored * (multiplied + facts.vocabulary * moved / (gpu.bandwidth_gbs * 1e9))


def _host_seconds(facts: Facts, work: Work, gpu: Gpu) -> float:
    """What the host needs to launch a micro-batch."""
    forwards = 2 if work.checkpointing == "full" else 1
    layer = forwards * gpu.host_forward_ms + gpu.host_backward_ms
    if work.fp8_compute and facts.has_experts:
        layer *= _FP8_EXPERTS_LAUNCHES
    return facts.layers * layer * 1e-3 * (1.0 if work.compiled else _EAGER_LAUNCHES)


def _optimizer_seconds(facts: Facts, work: Work, cluster: Cluster) -> float:
    owners = work.shards if work.shards > 1 else cluster.world_size
    bandwidth = _HOST_BANDWIDTH if work.offload_params else cluster.gpu.bandwidth_gbs * 1e9
    return facts.trained / owners * _OPTIMIZER_BYTES / bandwidth


def _gathers(work: Work) -> int:
    """How often everything is gathered in forward passes; as often in backward ones where it was freed."""
    return work.accumulation if _is_freed(work) or work.offload_params else 1


def _is_freed(work: Work) -> bool:
    """Whether a layer is gathered (or copied) again for its backward pass. Gathered adapters alone stay."""
    return work.reshard and (work.shards > 1 or work.offload_params)


def _total(links: Communication, work: Work) -> float:
    directions = 2 if _is_freed(work) else 1
    reductions = work.accumulation if work.offload_params else 1
    return _gathers(work) * (directions * links.layers + links.root) + reductions * links.reductions


def _exposed(
    facts: Facts, work: Work, cluster: Cluster, links: Communication, forward: float, backward: float
) -> tuple[float, float]:
    """Seconds of communication, and of copies to and from host memory, that nothing hides.

    While a layer computes, the next ones are gathered; gradients are reduced while earlier layers go backward. What
    nobody hides is the first layer's gather, the last reduction, and what takes longer than computing.
    """
    layers, times = max(1, facts.layers), _gathers(work)
    regathers = _is_freed(work)
    reductions = work.accumulation if work.offload_params else 1

    def unhidden(busy: float, computing: float) -> float:
        if work.prefetch == 0:
            return busy
        return busy / layers + max(0.0, busy - computing) * (layers - 1) / layers

    def of_gathers(once: float) -> float:
        last = min(reductions, times)  # micro-batches that gather and reduce
        back = (once if regathers else 0.0) + links.reductions
        passes = times * unhidden(once, forward) + last * unhidden(back, backward)
        return passes + (times - last) * unhidden(once if regathers else 0.0, backward) + times * links.root

    sent = of_gathers(links.layers)
    copied = of_gathers(max(links.layers, links.copies)) - sent if work.offload_params else 0.0
    if work.offload_activations:
        inputs = computed_tokens(work) * facts.hidden * work.value_bytes * layers / (cluster.gpu.pcie_gbs * 1e9)
        copied += work.accumulation * (max(0.0, inputs - forward) + max(0.0, inputs - backward))
    return sent, copied


@dataclass(frozen=True)
class ScalingPoint:
    """A step on so many nodes.

    Attributes:
        efficiency: Tokens per second and GPU, of those of the fewest nodes.
        communication: Share of a step that waits for links.
    """

    nodes: int
    step: StepTime
    efficiency: float

    @property
    def communication(self) -> float:
        return self.step.exposed / self.step.seconds

    @property
    def dominated(self) -> bool:
        """Links take longer than computing does."""
        return self.step.communication > self.step.compute


def scaling(
    facts: Facts, work: Work | Callable[[int], Work], cluster: Cluster, counts: Sequence[int] = NODES
) -> list[ScalingPoint]:
    """Steps on more and more nodes.

    Args:
        work: What a rank does, or a function that says it for a number of nodes (as `auto` would be resolved there).
            One work for all keeps each rank's micro-batches, so that the effective batch grows with the nodes (weak
            scaling), and is sharded over as many ranks everywhere; over all of them where that is not possible.
        cluster: Its first node is what all of them are like.
    """
    points: list[ScalingPoint] = []
    for nodes in counts:
        ranks = cluster.nodes[0] * nodes
        if isinstance(work, Work):
            here = work if ranks % work.shards == 0 else replace(work, shards=ranks)
        else:
            here = work(nodes)
        step = step_time(facts, here, replace(cluster, nodes=cluster.nodes[:1] * nodes))
        first = points[0] if points else None
        ideal = first.step.tokens_per_second * nodes / first.nodes if first else step.tokens_per_second
        points.append(ScalingPoint(nodes, step, step.tokens_per_second / ideal))
    return points


def dominated_from(points: Sequence[ScalingPoint]) -> int | None:
    """The fewest nodes from which on links take longer than computing."""
    return next((point.nodes for point in points if point.dominated), None)
