"""How long does a step send and copy? The bytes of `plan.traffic` over the links of a cluster.

A ring sends a buffer at the rate of its slowest link. Between nodes that is the network: each GPU's own card where it
has one (NCCL then runs as many rings as there are cards), or the node's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from shardtune.plan.catalogue import Cluster
from shardtune.plan.facts import Facts
from shardtune.plan.layer_cost import is_fp8
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
    model = model_bytes(facts, work)
    base = replace(model, trained=0)
    copies = 0.0
    if work.offload_params:
        copies = (model.layers + model.root) / work.shards / (cluster.gpu.pcie_gbs * 1e9)
    gathered = replace(model, root=0, reduced=0) if work.shards > 1 else replace(model, layers=0, root=0, reduced=0)
    return Communication(
        layers=_seconds(gathered, work, cluster, collectives=facts.layers),
        root=_seconds(replace(base, layers=0), work, cluster, collectives=1) if work.shards > 1 else 0.0,
        reductions=_seconds(replace(model, layers=0, root=0, gathered=0), work, cluster, collectives=facts.layers),
        copies=copies,
    )


def model_bytes(facts: Facts, work: Work) -> ModelBytes:
    """What collectives send of the model: frozen weights in the dtype that computes, or as float8 codes."""
    layers = sum(
        kind.count * prod(shape) * (1 if work.fp8 and is_fp8(facts, kind, name) else work.value_bytes)
        for kind in facts.kinds
        for name, shape in kind.parameters.items()
    )
    root = sum(map(prod, facts.root.values())) * work.value_bytes
    return ModelBytes(layers, root, facts.trained, work.value_bytes, work.reduce_bytes)


def traffic(facts: Facts, work: Work, cluster: Cluster) -> StepTraffic:
    """Bytes of an optimizer step."""
    model = model_bytes(facts, work)
    return step_traffic(
        model,
        replicas=cluster.world_size // work.shards,
        nodes=_node_of_ranks(cluster),
        micro_batches=work.accumulation,
        reshard_after_forward=work.reshard,
        offload_params=work.offload_params,
        adapters=adapter_layout(model, cluster.world_size).adapters,
    )


def _seconds(model: ModelBytes, work: Work, cluster: Cluster, collectives: int) -> float:
    """Of what `model` has, sent once."""
    world = cluster.world_size
    if world == 1:
        return 0.0
    sent = step_traffic(
        model,
        replicas=world // work.shards,
        nodes=_node_of_ranks(cluster),
        reshard_after_forward=False,
        adapters=adapter_layout(model, world).adapters,
    )
    ranks, nodes = max(cluster.nodes), len(cluster.nodes)
    out = cluster.between.bandwidth * (1 if cluster.between.shared else ranks)
    within = (sent.shard + sent.replicate) / cluster.within.bandwidth if ranks > 1 else 0.0
    # Messages of a ring go through all its ranks one after the other.
    ring = world if work.shards == 1 else work.shards
    hops_between = min(nodes, ring) if sent.between_nodes else 0
    latency = hops_between * cluster.between.latency + max(0, ring - 1 - hops_between) * cluster.within.latency
    return max(within, sent.between_nodes / out) + collectives * latency


def _node_of_ranks(cluster: Cluster) -> list[int]:
    return [node for node, ranks in enumerate(cluster.nodes) for _ in range(ranks)]
