"""Many faults on one run: `python tests/faults/soak.py --faults 200 --seed 1`. In the end it must be as if none had been.

Three nodes work with restarts on. Again and again a fault drawn from the seed hits one of them; every time the run must
come back and get further. The result is compared with that of a run nobody disturbed, and the table printed. `--toy`
uses the toy worker (restarts begin at step 0); otherwise a real training goes on from its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults.cluster import Cluster, environment_of_tests, why_no_namespaces
from toys import toy_config, toy_llama, toy_rows

NODES = 3
LAST_BYTES = 20_000  # of a log that grows with the run: the newest steps are in its last lines
BACK_SECONDS = 240  # a run that has not come back by then is lost: the soak has failed


class Job(ABC):
    """What the nodes work on."""

    def __init__(self, cluster: Cluster, faults: int) -> None:
        self.cluster, self.restarts = cluster, 3 * faults + 5

    @abstractmethod
    def start(self, node: int) -> None: ...

    @abstractmethod
    def mark(self) -> float:
        """Grows with every step that any attempt has done; how the driver sees that the run is back."""

    @abstractmethod
    def result(self) -> bytes: ...


class ToyJob(Job):
    def start(self, node: int) -> None:
        self.cluster.start_toy(node, env={"TOY_STEPS": "400"}, max_restarts=self.restarts)

    def mark(self) -> float:
        files = [self.cluster.folder / "run" / f"step-{rank}" for rank in range(NODES)]
        return min((file.stat().st_mtime for file in files if file.exists()), default=0.0) if all(
            file.exists() for file in files
        ) else 0.0  # fmt: skip

    def result(self) -> bytes:
        return b" ".join((self.cluster.folder / "run" / f"total-{rank}").read_bytes() for rank in range(NODES))


class TrainJob(Job):
    """A toy model that learns for some hundred steps, with a checkpoint every few."""

    def __init__(self, cluster: Cluster, faults: int) -> None:
        super().__init__(cluster, faults)
        folder = cluster.folder
        self.run = folder / "runs" / "soak"
        train = {"max_steps": 100 + 60 * faults, "save_strategy": "steps", "save_steps": 4}
        self.config = toy_config(
            folder, toy_llama(folder / "model"), toy_rows(folder / "data"), train=train,
            parallel={"step_timeout_minutes": 0.2, "node_timeout_seconds": 6, "max_restarts": self.restarts, "nproc": 1},
        )  # fmt: skip

    def start(self, node: int) -> None:
        words = ["train", self.config, "--run-id", "soak", "--nnodes", NODES, "--node-rank", node, "--master-addr",
                 self.cluster.address, "--master-port", self.cluster.port]  # fmt: skip
        environment = {**environment_of_tests(), "HF_HOME": str(self.cluster.folder / "hf"), "OMP_NUM_THREADS": "1"}
        self.cluster.machines[node].start([sys.executable, "-m", "shardtune", *map(str, words)], environment)

    def mark(self) -> float:
        log = self.run / "events-rank0.jsonl"
        if not log.exists():
            return 0.0
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[1:]
        steps = [json.loads(line) for line in lines if '"event": "step"' in line and line.endswith("}")]
        return float(steps[-1]["time"]) if steps else 0.0

    def result(self) -> bytes:
        return (self.run / "final" / "adapter_model.safetensors").read_bytes()


@dataclass(frozen=True)
class Row:
    number: int
    fault: str
    node: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.number:>4}  {self.fault:<14}  node {self.node}  back after {self.seconds:6.1f} s"


def kill_worker(job: Job, node: int) -> None:
    os.kill(job.cluster.machines[node].worker(node), signal.SIGKILL)


def stop_worker(job: Job, node: int) -> None:
    os.kill(job.cluster.machines[node].worker(node), signal.SIGSTOP)


def end_node(job: Job, node: int) -> None:
    """The power fails, and a scheduler starts the node's command again."""
    job.cluster.machines[node].kill()
    time.sleep(1)
    job.start(node)


def cut(job: Job, node: int) -> None:
    """The cable is out for longer than a node may be silent, then back in."""
    job.cluster.partition(node)
    time.sleep(10)
    job.cluster.heal(node)


def faults_of(cluster: Cluster) -> list[Callable[[Job, int], None]]:
    return [kill_worker, stop_worker, end_node] + ([cut] if cluster.hub else [])


def disturb(job: Job, faults: int, rng: random.Random) -> list[Row]:
    """Hit the run `faults` times, each time after it has come back and worked a while."""
    rows = []
    for number in range(1, faults + 1):
        fault, node = rng.choice(faults_of(job.cluster)), rng.randrange(NODES)
        time.sleep(rng.uniform(0.5, 4.0))
        began = time.time()
        fault(job, node)
        # Steps that were under way when the fault came do not count as being back.
        job.cluster.wait(lambda began=began: job.mark() > began + 3, BACK_SECONDS, f"coming back from {fault.__name__}")
        rows.append(Row(number, fault.__name__, node, time.time() - began))
        print(rows[-1], flush=True)
    return rows


def finish(job: Job) -> bytes:
    codes = [job.cluster.ended(node, 1800) for node in range(NODES)]
    if codes != [0] * NODES:
        raise AssertionError(f"the nodes ended with {codes}")
    return job.result()


def run_once(kind: type[Job], faults: int, seed: int, namespaces: bool, planned: int) -> tuple[bytes, list[Row]]:
    """`planned` faults decide how long the run is, `faults` how many of them really come."""
    with Cluster(NODES, namespaces=namespaces) as cluster:
        cluster.environment = environment_of_tests()
        job = kind(cluster, planned)
        for node in range(NODES):
            job.start(node)
        cluster.wait(lambda: job.mark() > 0, BACK_SECONDS, "the first step")
        rows = disturb(job, faults, random.Random(seed))
        return finish(job), rows


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="the toy worker instead of a training")
    asked = parser.parse_args(words)
    reason = why_no_namespaces()
    if reason is not None:
        print(f"on loopback, so the network is never cut: {reason}")
    kind = ToyJob if asked.toy else TrainJob
    undisturbed, _ = run_once(kind, 0, asked.seed, reason is None, asked.faults)
    disturbed, rows = run_once(kind, asked.faults, asked.seed, reason is None, asked.faults)
    same = undisturbed == disturbed
    for name in sorted({row.fault for row in rows}):
        seconds = [row.seconds for row in rows if row.fault == name]
        print(f"{name:<14} {len(seconds):>4} times, back after {min(seconds):.1f} to {max(seconds):.1f} s")
    print(f"seed {asked.seed}, {len(rows)} faults: the result is {'the same' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
