"""What do runs of a toy send under each setting? Measured by the profiler beside what the plan says, for docs/parallel.md.

python tests/train/traffic_runs.py docs/parallel.md
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

from ranks import free_ports, on_ranks
from toys import toy_config, toy_llama, toy_rows

from shardtune.plan.traffic import ModelBytes, StepTraffic, step_traffic

BEGIN, END = "<!-- begin: measured bytes -->", "<!-- end: measured bytes -->"
NODES = (0, 0, 1, 1)
REPLICAS = {"full": 1, "hybrid": 2, "replicate": 4}
STEP, MICRO_BATCHES = 3, 2  # the step that is shown
Profile = dict[str, dict[str, int]]


def main(config: str, ports: str) -> None:
    """Of a rank: the runs one after the other, on what its environment says are two nodes."""
    from interrupted import run

    os.environ["GROUP_RANK"] = str(NODES[int(os.environ["RANK"])])
    for port, setting in zip(json.loads(ports), REPLICAS, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        gathers = [] if setting == "replicate" else ["parallel.reshard_after_forward=true"]  # on a toy, auto is false
        assert run(Path(config), f"parallel.shard={setting}", *gathers, run_id=setting) == 0


def measure(environment: dict[str, str], folder: Path) -> dict[str, list[Profile]]:
    """The profile of one step of every rank, by setting."""
    config = toy_config(
        folder, toy_llama(folder / "model"), toy_rows(folder / "data"),
        data={"val_split": "validation"},  # what the evaluation before the step gathers is no part of it
        train={"max_steps": STEP, "gradient_accumulation_steps": MICRO_BATCHES, "eval_steps": STEP - 1},
    )  # fmt: skip
    on_ranks(environment, Path(__file__), len(NODES), config, json.dumps(free_ports(len(REPLICAS))), timeout=400)
    return {
        setting: [_profile(folder / "runs" / setting / f"events-rank{rank}.jsonl") for rank in range(len(NODES))]
        for setting in REPLICAS
    }


def _profile(events: Path) -> Profile:
    records: list[dict[str, Any]] = [json.loads(line) for line in events.read_text().splitlines()]
    [found] = [record for record in records if record["event"] == "profile" and record["step"] == STEP]
    return found


def planned(setting: str) -> StepTraffic:
    """Of `toy_llama` in float32 with adapters of rank 4 on q_proj and v_proj; 4 divides every number of rows."""
    hidden, kv, intermediate, vocabulary, layers, rank = 32, 16, 64, 72, 2, 4
    frozen = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate + 2 * hidden
    model = ModelBytes(
        layers=4 * frozen * layers,
        root=4 * (2 * vocabulary * hidden + hidden),
        trained=rank * (hidden + hidden + hidden + kv) * layers,
        gathered=4,
    )
    return step_traffic(model, replicas=REPLICAS[setting], nodes=NODES, micro_batches=MICRO_BATCHES)


def leaves_node(profiles: list[Profile], node: int = 0) -> int:
    """Weights and gradients that the ranks of a node send to the other one."""
    own = [profile["collectives_between_nodes"] for profile, of in zip(profiles, NODES, strict=True) if of == node]
    return sum(sent["shard"] + sent["replicate"] for sent in own)


def table(measured: dict[str, list[Profile]]) -> str:
    lines = [
        "| `parallel.shard` | leaves each node | planned | each process sends: `shard` | planned | `replicate` | planned |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for setting, profiles in measured.items():
        plan, sent = planned(setting), profiles[0]["collectives"]
        cells = (
            leaves_node(profiles), plan.between_nodes, sent["shard"], plan.shard, sent["replicate"], plan.replicate,
        )  # fmt: skip
        lines.append(f"| `{setting}` | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        found = table(measure(dict(os.environ), Path(temporary)))
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{found}\n{END}{rest.split(END)[1]}", encoding="utf-8")
