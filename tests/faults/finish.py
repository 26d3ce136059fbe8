"""Does every finished run end with 0? `python tests/faults/finish.py --runs 300` beside a machine that is kept busy.

Each run trains a toy on three processes for two steps, through the command line. Busy loops on every core make the
threads of launcher and ranks meet the end of their processes at odd moments; on a machine with many cores `--at-once`
starts several runs side by side. Prints the exit codes, and what a run said that did not end with 0.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults.cluster import environment_of_tests
from toys import toy_config, toy_llama, toy_rows


def _busy() -> None:
    while True:
        pass


def finish(runs: int, *, at_once: int, busy: int) -> collections.Counter[int]:
    """Exit codes of so many runs, so many of them at once, beside so many busy loops."""
    codes: collections.Counter[int] = collections.Counter()
    loops = [multiprocessing.Process(target=_busy, daemon=True) for _ in range(busy)]
    with tempfile.TemporaryDirectory(prefix="shardtune-finish-") as name:
        folder = Path(name)
        config = toy_config(folder, toy_llama(folder / "model"), toy_rows(folder / "data"), train={"max_steps": 2})
        command = [sys.executable, "-m", "shardtune", "train", str(config), "--nproc", "3", "--resume", "never"]
        environment = {**environment_of_tests(), "OMP_NUM_THREADS": "1"}
        for loop in loops:
            loop.start()

        def one_run(number: int) -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

        with ThreadPoolExecutor(at_once) as pool:
            for number, done in enumerate(pool.map(one_run, range(runs)), start=1):
                codes[done.returncode] += 1
                if done.returncode != 0:
                    print(f"run {number} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}", flush=True)
                if number % 25 == 0:
                    print(f"{number} runs: {dict(codes)}", flush=True)
        for loop in loops:
            loop.terminate()
    return codes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--busy", type=int, default=multiprocessing.cpu_count(), help="busy loops beside the runs")
    asked = parser.parse_args()
    began = time.monotonic()
    ended = finish(asked.runs, at_once=asked.at_once, busy=asked.busy)
    print(f"{sum(ended.values())} runs of three processes in {(time.monotonic() - began) / 60:.0f} min: {dict(ended)}")
    sys.exit(0 if set(ended) == {0} else 1)
