"""How long does a step send and copy? The bytes of `plan.traffic` over the links of a cluster.

A ring sends a buffer at the rate of its slowest link. Between nodes that is the network: each GPU's own card where it
has one (NCCL then runs as many rings as there are cards), or the node's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from shardtune.plan.catalogue import Cluster
from shardtune.plan.facts import Facts
from shardtune.plan.memory import fp8_weights
from shardtune.plan.traffic import ModelBytes, StepTraffic, adapter_layout, step_traffic
from shardtune.plan.work import Work


@dataclass(frozen=True)
class Communication:
    """Seconds on the links, whether or not something is computed meanwhile.

    Attributes:
        layers: Gathering all layers once.
        root: Gathering embeddings and head once.
        reductions: Of all gradients, once.
        copies: Copying all of a rank's own weights from host memory once; 0 unless they are offloaded.
    """

    layers: float
    root: float
    reductions: float
    copies: float


def communication(facts: Facts, work: Work, cluster: Cluster) -> Communication:
    """Of one pass over the model."""
    model, world = model_bytes(facts, work), cluster.world_size
    copies = (model.layers + model.root) / work.shards / (cluster.gpu.pcie_gbs * 1e9) if work.offload_params else 0.0
    if world == 1:
        return Communication(0.0, 0.0, 0.0, copies)
    nodes = [node for node, ranks in enumerate(cluster.nodes) for _ in range(ranks)]
    adapters = adapter_layout(model, world).adapters

    def seconds(part: ModelBytes, collectives: int) -> float:
        replicas = world // work.shards
        sent = step_traffic(part, replicas=replicas, nodes=nodes, reshard_after_forward=False, adapters=adapters)
        return _ring_seconds(sent, work, cluster, collectives)

    return Communication(
        layers=seconds(replace(model, root=0, reduced=0), facts.layers),
        root=seconds(replace(model, layers=0, trained=0), 1) if work.shards > 1 else 0.0,
        reductions=seconds(replace(model, layers=0, root=0, gathered=0), facts.layers),
        copies=copies,
    )


def model_bytes(facts: Facts, work: Work) -> ModelBytes:
    """What collectives send of the model: frozen weights in the dtype that computes, or as float8 codes."""
    layers = 0
    for kind in facts.kinds:
        codes = fp8_weights(kind) if work.fp8 else frozenset()
        sizes = (prod(shape) * (1 if name in codes else work.value_bytes) for name, shape in kind.parameters.items())
        layers += kind.count * sum(sizes)
    root = sum(map(prod, facts.root.values())) * work.value_bytes
    return ModelBytes(layers, root, facts.trained, work.value_bytes, work.reduce_bytes)


def _ring_seconds(sent: StepTraffic, work: Work, cluster: Cluster, collectives: int) -> float:
    """Of what is sent in so many collectives."""
    ranks, nodes = max(cluster.nodes), len(cluster.nodes)
    out = cluster.between.bandwidth * (1 if cluster.between.shared else ranks)
    within = (sent.shard + sent.replicate) / cluster.within.bandwidth if ranks > 1 else 0.0
    # Messages of a ring go through all its ranks one after the other.
    ring = cluster.world_size if work.shards == 1 else work.shards
    hops_between = min(nodes, ring) if sent.between_nodes else 0
    latency = hops_between * cluster.between.latency + max(0, ring - 1 - hops_between) * cluster.within.latency
    return max(within, sent.between_nodes / out) + collectives * latency
