"""What is known before anything is chosen? The machine, and the model as its parameters' names and shapes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtune.model.families.family import FastPath

Shape = tuple[int, ...]
# How many routed experts a token visits, under the names configs give it.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class Machine:
    """Where a run computes. All ranks go by one, so that none of them chooses differently.

    Attributes:
        device: cpu | cuda
        memory: Bytes a rank has: its GPU's, or its part of the host's; of the smallest rank.
        nodes: Ranks on each node.
        gpu: The GPU's name as its driver says it (`NVIDIA H200`); empty on a CPU.
        host_memory: Bytes of host memory that a node's ranks may use together; of the smallest node. 0 = unknown.
        lacks_bf16: A CPU without bfloat16 units.
    """

    device: str
    memory: int
    processes_here: int
    nodes: tuple[int, ...]
    gpu: str = ""
    host_memory: int = 0
    lacks_bf16: bool = False

    @property
    def world_size(self) -> int:
        return sum(self.nodes)


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers that are alike.

    Attributes:
        count: How many there are.
        parameters: Shapes by name below the layer (`self_attn.q_proj.weight`, `mlp.experts.gate_up_proj`).
        quantised: Those of them that the checkpoint stores in float8.
        adapted: Rank of the adapter by its site's name below the layer (`self_attn.q_proj`, `mlp.experts.down_proj`).
        window: How far back a token sees; None = all tokens before it.
    """

    count: int
    parameters: Mapping[str, Shape]
    quantised: frozenset[str]
    adapted: Mapping[str, int]
    window: int | None = None

    @property
    def size(self) -> int:
        """Parameters of one such layer."""
        return sum(prod(shape) for shape in self.parameters.values())


@dataclass(frozen=True)
class Facts:
    """What `resolve` goes by, beside the config.

    Attributes:
        model_type: Of the text model.
        model_class: The class that is trained, for sentences.
        model: The text model's config.json, as it is stored (so without transformers' defaults).
        dtype: What the weights are built in: model.torch_dtype, or the checkpoint's own.
        kinds: The decoder layers, alike ones together, in the order of their first.
        root: Shapes of the parameters outside of decoder layers (embeddings, final norm, head); tied ones once.
        trained: Parameters that train.
        layer_class: The decoder layer's class, where the family knows it.
        module_classes: Of all modules; empty where the model was not built.
        own_attention: The attention code transformers chooses.
        full_attention: In rows of data.max_length every token sees all tokens before it, in every layer.
        missing: Fast paths that this model does not take, and why.
        unsupported: Those among them that are known to compute something else.
        loss_obstacle: Why head and loss cannot be fused.
        router_coefficient: Weight of the routers' auxiliary loss in training; 0 = none.
        unused_router_loss: A notice where the model's config has a coefficient without an effect.
        fill_share: How much of data.max_length a row takes on average. Prepares the data, so it is asked last, and only
            where something depends on it.
    """

    machine: Machine
    model_type: str
    model_class: str
    model: Mapping[str, Any]
    dtype: str
    kinds: tuple[LayerKind, ...]
    root: Mapping[str, Shape]
    trained: int
    layer_class: str | None
    module_classes: frozenset[str]
    own_attention: str
    attention_dropout: bool
    full_attention: bool
    missing: Mapping[FastPath, str]
    unsupported: Mapping[FastPath, str]
    loss_obstacle: str | None
    router_coefficient: float
    unused_router_loss: str | None
    fill_share: Callable[[], float]

    @property
    def value_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def parameters(self) -> int:
        """Of the base."""
        return sum(map(prod, self.root.values())) + sum(kind.count * kind.size for kind in self.kinds)

    @property
    def quantised(self) -> int:
        """Parameters of the base that the checkpoint stores in float8."""
        return sum(kind.count * sum(prod(kind.parameters[name]) for name in kind.quantised) for kind in self.kinds)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.model["hidden_size"])

    @property
    def vocabulary(self) -> int:
        """Width of the output head."""
        return int(self.model["vocab_size"])

    @property
    def experts_per_token(self) -> int:
        """How many routed experts a token visits."""
        return int(next((self.model[name] for name in EXPERTS_PER_TOKEN if self.model.get(name)), 1))

    @property
    def has_experts(self) -> bool:
        """There are routed experts, fused into one tensor."""
        shapes = (item for kind in self.kinds for item in kind.parameters.items())
        return any(len(shape) == 3 and "experts." in name for name, shape in shapes)
