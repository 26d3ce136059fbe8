"""What would a step send? The table in docs/parallel.md, from `plan.traffic` and the shapes of three models.

python -m shardtune.plan.traffic_page docs/parallel.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardtune.plan.traffic import ModelBytes, adapter_layout, step_traffic
from shardtune.terminal import size

BEGIN, END = "<!-- begin: bytes per step -->", "<!-- end: bytes per step -->"
_RANK, _MICRO_BATCHES = 16, 8  # of the adapters; per step
_GPU = 139 * 2**30  # bytes that an H200 gives to a process
_STATE = 16  # bytes per trained parameter: its value, its gradient and two moments of Adam in float32
_CLUSTERS = ((3, 1), (2, 8), (8, 8))  # nodes, GPUs per node


@dataclass(frozen=True)
class _Dense:
    """A Llama in bf16: gated MLP, untied embeddings, no biases; adapters on all its linear layers."""

    hidden: int
    intermediate: int
    layers: int
    kv: int  # width of keys, and of values
    vocabulary: int

    def sizes(self) -> ModelBytes:
        linears = (
            [(self.hidden, self.hidden)] * 2 + [(self.hidden, self.kv)] * 2 + [(self.hidden, self.intermediate)] * 3
        )
        frozen = sum(a * b for a, b in linears) + 2 * self.hidden  # two norms
        root = 2 * self.vocabulary * self.hidden + self.hidden
        trained = _RANK * sum(a + b for a, b in linears) * self.layers
        return ModelBytes(layers=2 * frozen * self.layers, root=2 * root, trained=trained)


# Mistral Small 4 as transformers builds it: float8 codes of the layers' matrices, norms and routers in bf16; and
# embeddings, head and norm in bf16. Scales are left out: one per matrix.
_SMALL_4_LAYERS, _SMALL_4_ROOT = 117_879_865_344 + 2 * 19_215_360, 2 * (2 * 131072 * 4096 + 4096)
_MODELS = {
    "7B, bf16": _Dense(hidden=4096, intermediate=11008, layers=32, kv=4096, vocabulary=32000).sizes(),
    "70B, bf16": _Dense(hidden=8192, intermediate=28672, layers=80, kv=1024, vocabulary=128256).sizes(),
    "119B, FP8": ModelBytes(layers=_SMALL_4_LAYERS, root=_SMALL_4_ROOT, trained=27_500_000),
}


def table() -> str:
    """A row for each model, cluster and setting."""
    lines = [
        "| model | nodes × GPUs | `parallel.shard` | leaves each node | each GPU sends | each GPU holds |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, model in _MODELS.items():
        for nodes, gpus in _CLUSTERS:
            for setting, replicas in _settings(nodes, gpus):
                lines.append(f"| {name} | {nodes} × {gpus} | {setting} | {_cells(model, replicas, nodes, gpus)} |")
    return "\n".join(lines)


def _settings(nodes: int, gpus: int) -> Iterator[tuple[str, int]]:
    yield "`full`", 1
    if gpus > 1:
        yield "`hybrid`", nodes
    yield "`replicate`" if gpus > 1 else "`replicate`, `hybrid`", nodes * gpus


def _cells(model: ModelBytes, replicas: int, nodes: int, gpus: int) -> str:
    world = nodes * gpus
    adapters = adapter_layout(model, world).adapters
    sent = step_traffic(
        model,
        replicas=replicas,
        nodes=[rank // gpus for rank in range(world)],
        micro_batches=_MICRO_BATCHES,
        adapters=adapters,
    )
    shards = world // replicas
    trained_over = world if shards == 1 and adapters == "sharded" else shards
    holds = (model.layers + model.root) // shards + model.trained * _STATE // trained_over
    left = _GPU - holds
    note = f" (leaves {size(left)})" if left < _GPU // 10 else ""
    return f"{size(sent.between_nodes)} | {size(sent.shard + sent.replicate)} | {size(holds)}{note}"


def write_into(page: Path) -> None:
    """Replace what is between the markers."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    write_into(Path(sys.argv[1]))
