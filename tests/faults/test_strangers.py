"""Programs that are no nodes of the run talk to the master's port: they learn nothing, change nothing, and cost nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from faults.cluster import Cluster, environment_of_tests

from shardtune.launch.council import Word

BOUND = 120
TORCH_STORE = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=3))
for _ in range(30):
    store.set("word/0", sys.argv[2])
    print("SET", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with Cluster(2, namespaces=False) as cluster:
        cluster.environment = environment_of_tests()
        yield cluster


def test_a_stranger_with_a_torch_store_cannot_end_the_run(pair: Cluster) -> None:
    pair.start_all_toys(env={"TOY_STEPS": "200"})
    pair.wait_for_step(5, ranks=2)
    stranger = subprocess.run(
        [sys.executable, "-c", TORCH_STORE, str(pair.port), Word("end", code=0).to_json()],
        env=pair.environment, capture_output=True, text=True, timeout=BOUND,
    )  # fmt: skip
    assert stranger.returncode != 0 and "SET" not in stranger.stdout
    assert [pair.ended(node, BOUND) for node in range(2)] == [0, 0]
    assert {(pair.folder / "run" / f"total-{rank}").read_text() for rank in range(2)} == {"600.0"}
