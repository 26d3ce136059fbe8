"""How much does a slow network cost each way of sharding? Three nodes in network namespaces, their links limited.

    sudo python benchmarks/network.py [--quick] [--json out.json]

A toy with a frozen base and small adapters is trained by `shardtune train --nnodes 3`, with `parallel.shard` replicate
and full on one process per node, and replicate, hybrid and full on two. Full and hybrid gather a layer for each pass of
each micro-batch, as a base that has to be sharded does; `full-kept` gathers once a step and keeps what it has gathered
(`reshard_after_forward: false`), which needs the memory of `replicate`. The links are limited while it trains: not at
all, to what 100, 10 and 1 Gbit/s are for the reference (below), and not at all again; so every ratio is of one run.

What is counted:
- steps/s: from the median of `seconds.step` in rank 0's `profile` events, of the steps that lie within a phase; the
  first steps are warm-up. Where none ends within the phase (full sharding over a slow link takes minutes for one), from
  the bytes that left the nodes in it, over the bytes of a step; such a figure is marked `~`.
- over no limit: over the same run's steps/s without a limit, before and after; drift: a step after over one before.
- over replicate: over the steps/s of `replicate` at the same limit and the same number of processes.
- MB/step: bytes that leave a node in a step, mean of the nodes, from the counters of its interface, in steps without a
  limit: all of the run's traffic, with headers and acknowledgements.

What 1, 10 and 100 Gbit/s are. The toy computes for a fraction of a second on some megabytes; a real link would not slow
it down. Its link is scaled so that sending its base takes as many times longer than computing a micro-batch as for the
reference, Mistral Small 4 (119B) with its base in FP8 on one H200 per node; its adapters are the same share of it. The
computing time of a micro-batch is that of `replicate` without a limit, which sends next to nothing.

The limit is the kernel's token bucket (`tc qdisc … tbf`) on what a node sends and on what it receives; where there is
none, a process that all packets pass through (network_switch.py). Latency is not imitated. All processes share this
machine's cores, so absolute figures say nothing, and full sharding looks better over no limit than it is: even then its
gathers take time, because the cores that compute copy them. `replicate` looks worse: gloo's reduce-scatter is an
all-reduce and sends twice what NCCL's does, and beside adapters this small messages for metrics and heartbeats count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults.cluster import Cluster, environment_of_tests, why_no_namespaces, why_no_token_bucket  # noqa: E402
from network_switch import SwitchedCluster  # noqa: E402

NODES = 3
SETTINGS = {  # the section `parallel`
    "replicate": {"shard": "replicate"},
    "hybrid": {"shard": "hybrid", "reshard_after_forward": True},
    "full": {"shard": "full", "reshard_after_forward": True},
    "full-kept": {"shard": "full", "reshard_after_forward": False},
}
LAYOUTS = {1: ("replicate", "full", "full-kept"), 2: ("replicate", "hybrid", "full")}  # processes per node: modes
GIGABITS = (100, 10, 1)
LAYERS, HIDDEN, INTERMEDIATE, RANK, TOKENS, ACCUMULATION = 3, 512, 928, 6, 128, 8
WARM_UP = 3  # steps
START_SECONDS = 300
POLL = 0.05


@dataclass(frozen=True)
class Workload:
    """What a network has to keep up with: a micro-batch computes for `seconds` on a frozen base of that size."""

    base_bytes: float
    adapter_bytes: float
    seconds: float


# README, "Speed": Mistral 4, all 36 layers, FP8, 4 × 4096 tokens at 12,868 tokens/s. One byte for each of 119B frozen
# parameters, four for each of the 27.5M that configs/mistral-small-4.yaml trains.
REFERENCE = Workload(base_bytes=119e9, adapter_bytes=27.5e6 * 4, seconds=4 * 4096 / 12868)


def equivalent(bits_per_second: float, toy: Workload, reference: Workload = REFERENCE) -> float:
    """The link on which the toy's base takes as long, in units of its own computing, as the reference's on this one."""
    return bits_per_second * (toy.base_bytes / toy.seconds) / (reference.base_bytes / reference.seconds)


@dataclass(frozen=True)
class Step:
    ended: float
    seconds: float


@dataclass(frozen=True)
class Phase:
    """What was seen while the link was limited to one rate: of whole steps, or of a part of one if none ended."""

    steps: list[float]  # seconds of each
    seconds: float
    sent: list[float]  # bytes, by node

    def steps_per_second(self, bytes_per_step: float) -> float:
        if self.steps:
            return 1 / statistics.median(self.steps)
        return statistics.mean(self.sent) / bytes_per_step / self.seconds


class Watch:
    """A run under way: its steps, from rank 0's events, and what each node has sent, from its interface."""

    def __init__(self, cluster: Cluster, events: Path) -> None:
        self.cluster, self.events = cluster, events
        self.steps: list[Step] = []
        self.samples: list[tuple[float, list[int]]] = []
        self._offset = 0

    def poll(self) -> None:
        time.sleep(POLL)
        for machine in self.cluster.machines:
            assert machine.process is not None
            if machine.process.poll() is not None:
                raise SystemExit(f"node {machine.number} ended with exit code {machine.process.returncode}")
        if self.events.exists():
            self._read_steps()
            self.samples.append((time.time(), [sent_bytes(machine.process.pid) for machine in self.cluster.machines]))

    def _read_steps(self) -> None:
        with self.events.open("rb") as file:
            file.seek(self._offset)
            whole, line_end, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(line_end)
        for event in map(json.loads, whole.splitlines()):
            if event["event"] == "profile":
                self.steps.append(Step(event["time"], event["seconds"]["step"]))

    def warm_up(self) -> None:
        until = time.monotonic() + START_SECONDS
        while len(self.steps) < WARM_UP:
            if time.monotonic() > until:
                raise SystemExit(f"not {WARM_UP} steps within {START_SECONDS} s")
            self.poll()

    def observe(self, steps: int, seconds: float) -> Phase:
        """Until so many whole steps have been seen, or the time is over."""
        began = time.time()
        while len(self._within(began)) < steps and time.time() < began + seconds:
            self.poll()
        mine, ended = self._within(began), time.time()
        if mine:
            began, ended = mine[0].ended - mine[0].seconds, mine[-1].ended
        return Phase([step.seconds for step in mine], ended - began, self._sent(began, ended))

    def _within(self, began: float) -> list[Step]:
        return [step for step in self.steps if step.ended - step.seconds >= began]

    def _sent(self, began: float, ended: float) -> list[float]:
        import numpy

        times = [at for at, _ in self.samples]
        by_node = zip(*(counted for _, counted in self.samples), strict=True)
        return [float(numpy.diff(numpy.interp((began, ended), times, counted))[0]) for counted in by_node]


def sent_bytes(pid: int) -> int:
    """What has left the network namespace of a process by its one interface."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("net0:"))
    return int(line.split(":")[1].split()[8])  # after eight columns of what was received


@dataclass(frozen=True)
class Rate:
    """How a mode fares on a link."""

    steps_per_second: float
    steps: int  # that were timed; 0: from the bytes sent


@dataclass(frozen=True)
class Measured:
    """One mode, in one run."""

    step_seconds: float  # without a limit
    drift: float  # the same at the end over the same at the start
    bytes_per_step: list[float]  # that leave each node
    rates: dict[int, Rate]  # by Gbit/s

    def ratio(self, gigabits: int) -> float:
        return self.rates[gigabits].steps_per_second * self.step_seconds


@dataclass(frozen=True)
class Options:
    cluster: type[Cluster]
    steps: int  # to time at each limit
    seconds: float  # after which a limit has been looked at long enough


def make_toy(folder: Path) -> Workload:
    """A model's config.json, tokenizer and rows, and a run's config. How long it computes is not known yet."""
    import torch
    from toys import WORDS, toy_config, toy_text_config, toy_tokenizer
    from transformers import AutoModelForCausalLM

    shape = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    config = toy_text_config("llama", architectures=["LlamaForCausalLM"], **shape)
    config.save_pretrained(folder / "model")
    toy_tokenizer(folder / "model")
    (folder / "data").mkdir()
    row = json.dumps({"text": " ".join(WORDS[number % len(WORDS)] for number in range(TOKENS - 1))})
    (folder / "data" / "train.jsonl").write_text(f"{row}\n" * 256)
    toy_config(
        folder, folder / "model", folder / "data", model={"weights": "random"},
        # The first layer's: gradients go back through all layers.
        lora={"r": RANK, "target_modules": ["q_proj"], "layers_to_transform": [0]},
        data={"prompt_template": None, "max_length": TOKENS, "concatenate": False},
        train={"max_steps": 1_000_000, "per_device_train_batch_size": 1, "gradient_accumulation_steps": ACCUMULATION,
               "gradient_checkpointing": False, "lr_scheduler_type": "constant", "learning_rate": 1e-4},
        parallel={"step_timeout_minutes": 60},
    )  # fmt: skip
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    return Workload(base_bytes=4 * parameters, adapter_bytes=4 * RANK * 2 * HIDDEN, seconds=float("nan"))


def start(cluster: Cluster, folder: Path, mode: str, processes: int) -> Watch:
    name = f"{mode}-{NODES}x{processes}"
    for machine in cluster.machines:
        words = ["train", folder / "run.yaml", "--run-id", name, "--nnodes", NODES, "--node-rank", machine.number,
                 "--master-addr", cluster.address, "--master-port", cluster.port, "--nproc", processes]  # fmt: skip
        words += [
            word for key, value in SETTINGS[mode].items() for word in ("-o", f"parallel.{key}={json.dumps(value)}")
        ]
        caches = {"HF_HOME": str(folder / "hf"), "SHARDTUNE_CACHE": str(folder / "cache")}
        environment = {**environment_of_tests(), **caches, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        machine.start([sys.executable, "-m", "shardtune", *map(str, words)], environment)
    return Watch(cluster, folder / "runs" / name / "events-rank0.jsonl")


def measure(folder: Path, mode: str, processes: int, toy: Workload, options: Options) -> tuple[Measured, Workload]:
    """One run, its link limited to one rate after the other. The first of a layout tells how long the toy computes."""
    with options.cluster(NODES, namespaces=True) as cluster:
        watch = start(cluster, folder, mode, processes)
        watch.warm_up()
        before = watch.observe(options.steps, START_SECONDS)
        if math.isnan(toy.seconds):
            toy = replace(toy, seconds=statistics.median(before.steps) / ACCUMULATION)
        phases = {}
        for gigabits in GIGABITS:
            cluster.limit(equivalent(gigabits * 1e9, toy))
            phases[gigabits] = watch.observe(options.steps, options.seconds)
        cluster.limit(None)
        after = watch.observe(options.steps, START_SECONDS)
    if not (before.steps and after.steps):
        raise SystemExit(f"{mode}: no step within {START_SECONDS} s, without any limit")
    per_step = [sent / len(before.steps) for sent in before.sent]
    rates = {
        gigabits: Rate(phase.steps_per_second(statistics.mean(per_step)), len(phase.steps))
        for gigabits, phase in phases.items()
    }
    drift = statistics.median(after.steps) / statistics.median(before.steps)
    return Measured(statistics.median(before.steps + after.steps), drift, per_step, rates), toy


def scaling(toy: Workload) -> list[str]:
    """The arithmetic of `equivalent`, in words."""
    gigabytes, megabytes = REFERENCE.base_bytes / 1e9, toy.base_bytes / 1e6
    shares = [f"{load.adapter_bytes / load.base_bytes:.3%}" for load in (REFERENCE, toy)]
    lines = [
        f"  reference: base {gigabytes:.0f} GB, adapters {shares[0]} of it, {REFERENCE.seconds:.2f} s per micro-batch",
        f"  toy:       base {megabytes:.1f} MB, adapters {shares[1]} of it, {toy.seconds:.3f} s per micro-batch",
    ]
    for gigabits in GIGABITS:
        lines.append(
            f"  {gigabits} Gbit/s × ({megabytes:.1f} MB / {toy.seconds:.3f} s) / ({gigabytes:.0f} GB / "
            f"{REFERENCE.seconds:.2f} s) = {equivalent(gigabits * 1e9, toy) / 1e6:.2f} Mbit/s"
        )
    return lines


def table(measured: dict[str, Measured]) -> list[str]:
    """Each mode over itself without a limit, and over `replicate` on the same link."""
    replicate = measured["replicate"]
    head = "".join(f"{f'{gigabits} Gbit/s':>12}" for gigabits in GIGABITS)
    lines = [
        f"  {'':<10}{'':>9}{'steps/s over no limit':^36}{'':>7}  {'steps/s over replicate':^48}",
        f"  {'':<10}{'MB/step':>9}{head}{'drift':>7}  {'no limit':>12}{head}",
    ]
    for mode, now in measured.items():
        own, against = "", f"{replicate.step_seconds / now.step_seconds:>12.3f}"
        for gigabits, rate in now.rates.items():
            mark = "" if rate.steps else "~"
            own += f"{f'{mark}{now.ratio(gigabits):.3f}':>12}"
            others = rate.steps_per_second / replicate.rates[gigabits].steps_per_second
            against += f"{f'{mark}{others:.4f}':>12}"
        megabytes = statistics.mean(now.bytes_per_step) / 1e6
        lines.append(f"  {mode:<10}{megabytes:>9.3f}{own}{now.drift:>7.2f}  {against}")
    return lines


def measure_layout(folder: Path, processes: int, sizes: Workload, options: Options) -> dict[str, Any]:
    print(f"\n{NODES} nodes × {processes} process{'es' if processes > 1 else ''}")
    toy, measured = sizes, {}
    for mode in LAYOUTS[processes]:
        measured[mode], toy = measure(folder, mode, processes, toy, options)
        if len(measured) == 1:
            print("\n".join(scaling(toy)), flush=True)
    print("\n".join(table(measured)), flush=True)
    links = {gigabits: equivalent(gigabits * 1e9, toy) for gigabits in GIGABITS}
    modes = {mode: asdict(now) for mode, now in measured.items()}
    return {"processes": processes, "toy": asdict(toy), "links_bits_per_second": links, "modes": modes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 steps or 20 s at each limit, instead of 10 or 90 s")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if (reason := why_no_namespaces()) is not None:
        sys.exit(f"Three nodes on this machine need network namespaces, but {reason}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the nodes are ended and removed too
    no_bucket = why_no_token_bucket()
    limited_by = "tc (tbf)" if no_bucket is None else f"network_switch.py, because {no_bucket}"
    load, cluster = os.getloadavg()[0], Cluster if no_bucket is None else SwitchedCluster
    options = Options(cluster, 5, 20.0) if asked.quick else Options(cluster, 10, 90.0)
    print(f"links limited by {limited_by}; {os.cpu_count()} cores, load {load:.1f} before the start")
    print(f"{ACCUMULATION} micro-batches of {TOKENS} tokens per process and step")
    with tempfile.TemporaryDirectory() as folder:
        sizes = make_toy(Path(folder))
        layouts = [measure_layout(Path(folder), processes, sizes, options) for processes in LAYOUTS]
    if asked.json:
        found = {"limited_by": limited_by, "load_before": load, "reference": asdict(REFERENCE), "layouts": layouts}
        asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
