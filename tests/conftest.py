"""What tests share: toys made once, and the command line as users call it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import REPOSITORY, Command
from toys import toy_llama, toy_rows

# Set before anything imports the libraries: a test never asks a hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# A shell starts background jobs (`make test &`) deaf to Ctrl-C, and their children inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# These start processes that import torch and train. They come first: a long file that begins last would leave the other
# worker of pytest-xdist without work.
_HEAVY = ("faults", "train", "launch", "parallel", "quickstart", "cli")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _HEAVY.index(item.path.parent.name) if item.path.parent.name in _HEAVY else len(_HEAVY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files are dealt out whole, in their order; clusters of processes that lose each other come one after the other."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "faults" if nodeid.startswith("tests/faults/") else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("toy-model"))


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_rows(tmp_path_factory.mktemp("toy-data"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user without any rank variables, with caches of its own."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "SHARDTUNE_", "ACCELERATE_", "FSDP_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        ours.pop(name, None)
    return {
        **ours, "HF_HOME": str(tmp_path_factory.mktemp("hf-home")), "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",  # toys: more threads only wait for each other
    }  # fmt: skip


@pytest.fixture(scope="session")
def shardtune(environment: dict[str, str]) -> Command:
    """Run `shardtune ARGS` in a process of its own."""

    def run(*args: object, env: dict[str, str] | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardtune", *map(str, args)],
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
