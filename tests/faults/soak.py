"""Many faults on one run: `python tests/faults/soak.py --faults 200 --seed 1`. In the end it must be as if none had been.

Three nodes work with restarts on. Again and again a fault drawn from the seed hits one of them; every time the run must
come back from its checkpoints and get further. The result is compared with that of a run nobody disturbed, and the table
printed.

How fast the machine is must not matter: a fault comes when the run has done some steps since the last one, the run is
told to go on for ever, and when it has come back from the last fault it is stopped by a signal and finished a few steps
later. The run to compare with is then as long as that one turned out to be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults.cluster import Cluster, environment_of_tests, why_no_namespaces
from toys import toy_config, toy_llama, toy_rows

from shardtune.checkpoint.store import CheckpointStore

NODES = 3
FOR_EVER = 1_000_000  # steps; nothing but the learning rate's schedule hangs on it, and that is constant here
MORE_STEPS = 5  # after the stop
BACK_SECONDS = 240  # a run that has not come back by then is lost: the soak has failed


class Job:
    """What the nodes work on: a toy model that learns, with a checkpoint every few steps, until `steps`. `parallel` are
    settings of that section."""

    def __init__(self, cluster: Cluster, restarts: int, steps: int = FOR_EVER, **parallel: object) -> None:
        self.cluster, folder = cluster, cluster.folder
        self.run, self.steps = folder / "runs" / "soak", steps
        train = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 4}
        self.config = toy_config(
            folder, toy_llama(folder / "model"), toy_rows(folder / "data"), train=train,
            parallel={
                # A stopped worker may stop in the middle of a save too, or while it comes back.
                "step_timeout_minutes": 0.2, "checkpoint_timeout_minutes": 0.2, "load_timeout_minutes": 1.5,
                "node_timeout_seconds": 6, "max_restarts": restarts, "nproc": 1,
                **parallel,
            },
        )  # fmt: skip
        self.log = Log(self.run / "events-rank0.jsonl")

    def start(self, node: int) -> None:
        words = ["train", self.config, "--run-id", "soak", "--nnodes", NODES, "--node-rank", node, "--master-addr",
                 self.cluster.address, "--master-port", self.cluster.port, "-o", f"train.max_steps={self.steps}"]  # fmt: skip
        environment = {**environment_of_tests(), "HF_HOME": str(self.cluster.folder / "hf"), "OMP_NUM_THREADS": "1"}
        self.cluster.machines[node].start([sys.executable, "-m", "shardtune", *map(str, words)], environment)

    def start_all(self) -> None:
        for node in range(NODES):
            self.start(node)

    def end_with(self, code: int) -> None:
        codes = [self.cluster.ended(node, 900) for node in range(NODES)]
        if codes != [code] * NODES:
            raise AssertionError(f"the nodes ended with {codes} instead of {code}")

    def now(self) -> int:
        """A mark that `is_back` is asked with, taken just before a fault."""
        return self.log.read().attempts

    def is_back(self, since: int) -> bool:
        """Has an attempt that was started after the mark done a step?"""
        log = self.log.read()
        return log.attempts > since and log.steps_of_attempt > 0

    def work_a_while(self, rng: random.Random) -> None:
        more = rng.randint(2, 12)
        self.cluster.wait(lambda: self.log.read().steps_of_attempt > more, BACK_SECONDS, f"{more} more steps")

    def finish(self) -> bytes:
        """Wait for the end; what was learnt."""
        if self.steps == FOR_EVER:
            launcher = self.cluster.machines[NODES - 1].process
            assert launcher is not None
            launcher.send_signal(signal.SIGTERM)
            self.end_with(75)
            self.steps = CheckpointStore(self.run / "checkpoints", None).steps()[-1] + MORE_STEPS
            self.start_all()
        self.end_with(0)
        return (self.run / "final" / "adapter_model.safetensors").read_bytes()


class Log:
    """The events of a run that is being written, read on from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempts = self.steps_of_attempt = self._offset = 0

    def read(self) -> Log:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, line_end, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(line_end)
            for line in whole.splitlines():
                if b'"event": "run_start"' in line:
                    self.attempts, self.steps_of_attempt = self.attempts + 1, 0
                elif b'"event": "step"' in line:
                    self.steps_of_attempt += 1
        return self


@dataclass(frozen=True)
class Row:
    number: int
    fault: str
    node: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.number:>4}  {self.fault:<14}  node {self.node}  back after {self.seconds:6.1f} s"


def kill_worker(job: Job, node: int) -> None:
    os.kill(worker_of(job, node), signal.SIGKILL)


def stop_worker(job: Job, node: int) -> None:
    os.kill(worker_of(job, node), signal.SIGSTOP)


def worker_of(job: Job, node: int) -> int:
    """The node's worker; waited for, as a slow machine may just be starting it again by itself."""
    found: list[int] = []

    def there() -> bool:
        with contextlib.suppress(AssertionError):
            found.append(job.cluster.machines[node].worker(node))
        return bool(found)

    job.cluster.wait(there, BACK_SECONDS, f"a worker on node {node}")
    return found[0]


def end_node(job: Job, node: int) -> None:
    """The power fails, and a scheduler starts the node's command again."""
    job.cluster.machines[node].kill()
    time.sleep(1)
    job.start(node)


def cut(job: Job, node: int) -> None:
    """The cable is out for longer than a node may be silent, then back in."""
    job.cluster.partition(node)
    time.sleep(8)
    job.cluster.heal(node)


def faults_of(cluster: Cluster) -> list[Callable[[Job, int], None]]:
    return [kill_worker, stop_worker, end_node] + ([cut] if cluster.hub else [])


def deal(cluster: Cluster, faults: int, rng: random.Random) -> Iterator[Callable[[Job, int], None]]:
    """Like cards: every kind has come once before any comes again."""
    deck: list[Callable[[Job, int], None]] = []
    for _ in range(faults):
        if not deck:
            deck = faults_of(cluster)
            rng.shuffle(deck)
        yield deck.pop()


def disturb(job: Job, faults: int, rng: random.Random) -> list[Row]:
    """Hit the run `faults` times, each time after it has come back and worked a while."""
    rows = []
    for number, fault in enumerate(deal(job.cluster, faults, rng), start=1):
        node = rng.randrange(NODES)
        job.work_a_while(rng)
        began, mark = time.monotonic(), job.now()
        fault(job, node)
        job.cluster.wait(lambda mark=mark: job.is_back(mark), BACK_SECONDS, f"coming back from {fault.__name__}")
        rows.append(Row(number, fault.__name__, node, time.monotonic() - began))
        print(rows[-1], flush=True)
    return rows


def run_once(make: Callable[[Cluster], Job], faults: int, seed: int, namespaces: bool) -> tuple[bytes, list[Row], Job]:
    with Cluster(NODES, namespaces=namespaces) as cluster:
        cluster.environment = environment_of_tests()
        job = make(cluster)
        mark = job.now()
        job.start_all()
        cluster.wait(lambda: job.is_back(mark), BACK_SECONDS, "the first step")
        rows = disturb(job, faults, random.Random(seed))
        return job.finish(), rows, job


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    reason = why_no_namespaces()
    if reason is not None:
        print(f"on loopback, so the network is never cut: {reason}")
    restarts = 3 * asked.faults + 5
    disturbed, rows, job = run_once(lambda cluster: Job(cluster, restarts), asked.faults, asked.seed, reason is None)
    undisturbed, _, _ = run_once(lambda cluster: Job(cluster, restarts, job.steps), 0, asked.seed, reason is None)
    same = undisturbed == disturbed
    for name in sorted({row.fault for row in rows}):
        seconds = [row.seconds for row in rows if row.fault == name]
        print(f"{name:<14} {len(seconds):>4} times, back after {min(seconds):.1f} to {max(seconds):.1f} s")
    print(
        f"seed {asked.seed}, {len(rows)} faults, {job.steps} steps: the result is {'the same' if same else 'DIFFERENT'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
