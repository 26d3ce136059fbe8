"""Many short runs beside a busy machine: `python tests/faults/endings.py --runs 300`. Every one must end with 0.

A thread that is inside C++ when an interpreter ends can abort a process whose work is done; that shows now and then, on a
machine that has other things to do. `--toy` runs the toy worker under the launcher; otherwise each run is a training of
two steps. Other than tests, this may take an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults.cluster import TOY_NODE, environment_of_tests
from toys import toy_config, toy_llama, toy_rows

LIMIT = 600  # seconds for one run


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def command_of(folder: Path, toy: bool, nproc: int) -> tuple[list[str], dict[str, str]]:
    environment = {**environment_of_tests(), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf")}
    if toy:
        environment |= {"TOY_FOLDER": str(folder / "run"), "TOY_PARALLEL": '{"device": "cpu"}', "TOY_STEPS": "2"}
        return [sys.executable, str(TOY_NODE), "1", "0", str(nproc), "127.0.0.1", "0"], environment
    config = toy_config(folder, toy_llama(folder / "model"), toy_rows(folder / "data"), train={"max_steps": 2})
    return [sys.executable, "-m", "shardtune", "train", str(config), "--nproc", str(nproc)], environment


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="processes that keep the machine busy")
    parser.add_argument("--toy", action="store_true", help="the toy worker instead of a training")
    asked = parser.parse_args(words)
    codes: Counter[int] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardtune-endings-") as name, busy(asked.busy):
        command, environment = command_of(Path(name), asked.toy, asked.nproc)
        for number in range(asked.runs):
            more = [] if asked.toy else ["--run-id", f"run{number}"]
            done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=LIMIT)
            codes[done.returncode] += 1
            if done.returncode != 0:
                print(
                    f"run {number} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}",
                    flush=True,
                )
    told = ", ".join(f"{count} with exit code {code}" for code, count in sorted(codes.items()))
    print(f"{asked.runs} runs on {asked.nproc} processes in {time.monotonic() - began:.0f} s: {told}")
    return 0 if set(codes) == {0} else 1


if __name__ == "__main__":
    sys.exit(main())
