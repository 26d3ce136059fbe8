"""The same command under our launcher, torchrun, accelerate and a scheduler; and how it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import Command, events
from toys import toy_config, toy_rows

from shardtune.observe.events import VERSION
from shardtune.report.api import RunsApi
from shardtune.report.history import RunHistory
from shardtune.report.page import embedded
from shardtune.report.view import run_view

ACCELERATE_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
main_process_port: 0
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: FULL_STATE_DICT
"""


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(tmp_path, toy_model, toy_data, train={"max_steps": 2})


@pytest.fixture(scope="module")
def expected(
    shared_shardtune: Command, toy_model: Path, toy_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """The losses of two steps on two processes under our own launcher."""
    folder = tmp_path_factory.mktemp("ours")
    result = shared_shardtune("train", toy_config(folder, toy_model, toy_data, train={"max_steps": 2}), "--nproc", 2)
    assert result.returncode == 0, result.stderr
    return losses(folder)


def losses(folder: Path) -> list[float]:
    (run,) = (folder / "runs").iterdir()
    assert {path.name for path in run.glob("events-*")} == {"events-rank0.jsonl", "events-rank1.jsonl"}
    return [event["loss"] for event in events(run, "step")]


def run(
    environment: dict[str, str], *command: object, timeout: float = 300, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), env={**environment, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


@pytest.mark.slow
def test_torchrun_starts_workers(config: Path, environment: dict[str, str], expected: list[float]) -> None:
    result = run(
        environment, sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", 2, "-m", "shardtune", "train", config,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert losses(config.parent) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_accelerate_launch_starts_workers_and_its_file_is_honoured(config: Path, environment: dict[str, str]) -> None:
    file = config.parent / "fsdp.yaml"
    file.write_text(ACCELERATE_FILE)
    result = run(
        environment, sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", file,
        "-m", "shardtune", "train", config,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert len(losses(config.parent)) == 2
    (made,) = (config.parent / "runs").iterdir()
    text = (made / "config.yaml").read_text()
    assert "reshard_after_forward: false " in text and "bf16: true " in text
    assert "transformer_layer_cls_to_wrap: LlamaDecoderLayer" in text
    assert "FSDP2 over 2 processes on cpu" in result.stdout  # and not accelerate's own idea of it
    shares = [events(made, "plan", rank)[0]["sharding"] for rank in range(2)]
    assert sum(share["local_bytes"] for share in shares) == shares[0]["total_bytes"]


@pytest.mark.slow
def test_two_pods_of_a_trainjob_become_two_nodes(
    config: Path, environment: dict[str, str], expected: list[float]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pods = [
        subprocess.Popen(
            [sys.executable, "-m", "shardtune", "train", str(config), "--run-id", "pods"],
            env={
                **environment, "OMP_NUM_THREADS": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [pod.communicate(timeout=240) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert losses(config.parent) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_nodes_whose_files_hold_other_rows_exit_with_2_and_name_the_ranks(
    tmp_path: Path, toy_model: Path, environment: dict[str, str]
) -> None:
    """Each node has its own disk: the same relative path, and other rows on one of them."""
    config = toy_config(tmp_path, toy_model, Path("data"), train={"max_steps": 2})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = []
    for rank in range(2):
        toy_rows(tmp_path / f"node{rank}" / "data", seed=rank)
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-m", "shardtune", "train", str(config), "--run-id", "r"],
                env={**environment, **place, "OMP_NUM_THREADS": "1", "SHARDTUNE_CACHE": str(tmp_path / f"cache{rank}")},
                cwd=tmp_path / f"node{rank}", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    said = [node.communicate(timeout=180)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], said
    for text in said:
        assert "The ranks have prepared different data." in text and "Traceback" not in text
        assert "on rank 0 (" in text and "on rank 1 (" in text and "same files" in text


def start_long_run(
    config: Path, environment: dict[str, str], nproc: int, *more: str
) -> tuple[subprocess.Popen[str], Path]:
    """A run that would take for ever, with its first step behind it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", str(config), "--nproc", str(nproc), "--run-id", "long",
         "-o", "train.max_steps=100000", *more],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    folder = config.parent / "runs" / "long"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        log = folder / "events-rank0.jsonl"
        if log.exists() and '"event": "step"' in log.read_text():
            return process, folder
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"no first step: {process.communicate()}")


@pytest.mark.parametrize(
    ("number", "nproc", "whole_group", "code"),
    [
        (signal.SIGINT, 2, True, 130),
        pytest.param(signal.SIGINT, 1, False, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, False, 75, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_after_the_step_and_keeps_what_was_learnt(
    config: Path, environment: dict[str, str], number: signal.Signals, nproc: int, whole_group: bool, code: int
) -> None:
    """Ctrl-C in a terminal reaches the whole process group; `kill` the launcher alone."""
    process, folder = start_long_run(config, environment, nproc)
    try:
        os.killpg(process.pid, number) if whole_group else process.send_signal(number)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "Stopped on request after step" in out
    assert err.count(f"{number.name}: stopping after this step") == 1, err
    assert "Traceback" not in err
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    step = json.loads((checkpoint / "trainer.json").read_text())["step"]
    assert checkpoint.name == f"step-{step:06d}" and (checkpoint / "adapter_model.safetensors").stat().st_size > 0
    assert events(folder, "run_end")[0] | {"time": 0} == {
        "v": VERSION, "time": 0, "rank": 0, "event": "run_end", "status": "stopped", "step": step,
    }  # fmt: skip
    assert not (folder / "final").exists()
    assert_gone(folder)


@pytest.mark.parametrize("nproc", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_as_soon_as_the_run_has_a_folder_says_so_and_takes_the_folder_away(
    config: Path, environment: dict[str, str], nproc: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", str(config), "--nproc", str(nproc), "--run-id", "long"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    folder, deadline = config.parent / "runs" / "long", time.monotonic() + 120
    try:
        while not (folder / "run.json").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # the ranks are importing
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out.count("Stopped before the first step; there is nothing to save.") == 1
    assert "Traceback" not in err and not folder.exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_and_is_named_by_launcher_report_and_dashboard(
    config: Path, environment: dict[str, str]
) -> None:
    process, folder = start_long_run(config, environment, 2)
    try:
        os.kill(worker_pids(folder)[1], signal.SIGKILL)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 137, err
    assert "Rank 1 was killed by signal 9 (SIGKILL)" in err and "OOM kill" in err
    assert "Traceback" not in err
    assert_gone(folder)
    assert events(folder, "run_failed")[0]["exit_code"] == 1, "rank 0 saw its connection break"
    history = RunHistory(folder)
    history.update()
    view = run_view(history, time.time())
    (row,) = [row for row in RunsApi(folder.parent).runs(None)["runs"] if row["name"] == folder.name]
    for status, why in ((view["status"], view["why"]), (row["status"], row["why"])):
        assert status == "failed" and why.startswith("Rank 1 was killed by signal 9 (SIGKILL) while ")
        assert why.endswith("; exit code 137.")
    assert view["advice"] and all(line in err for line in view["advice"])
    ((_, what, said, ranks, _),) = view["problems"]["rows"]
    assert what["text"] == "failure" and said.startswith("Rank 1 was killed") and ranks == "1"
    assert "closed by peer" not in embedded(view)


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_ranks_and_their_data_loaders_with_it(
    config: Path, environment: dict[str, str]
) -> None:
    more = ("-o", "train.dataloader_num_workers=1", "-o", "train.dataloader_persistent_workers=true")
    process, folder = start_long_run(config, environment, 2, *more)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert_gone(folder, seconds=40)  # an idle data loader looks for its rank every 5 s


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run_and_leaves_its_stack(config: Path, environment: dict[str, str]) -> None:
    process, folder = start_long_run(config, environment, 2, "-o", "parallel.step_timeout_minutes=0.1")
    try:
        os.kill(worker_pids(folder)[1], signal.SIGSTOP)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 76, err
    assert "Rank 1 was stopped (SIGSTOP or a debugger)" in err and "Rank 0 waited for it." in err
    assert "Traceback" not in err
    assert "shardtune/train/run.py" in (folder / "crash" / "rank-0.txt").read_text()  # wherever it waits
    assert "shardtune/train/loop.py" in (folder / "crash" / "rank-1.txt").read_text()
    assert events(folder, "no_progress")[0]["kind"] == "waiting"
    assert_gone(folder)


def worker_pids(folder: Path) -> list[int]:
    """Processes that have this run's folder in their environment, rank by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(
                entry.split("=", 1) for entry in (path / "environ").read_text().split("\0") if "=" in entry
            )
        except (OSError, UnicodeDecodeError):
            continue
        if variables.get("SHARDTUNE_RUN_DIR") == str(folder) and "RANK" in variables:
            found[int(variables["RANK"])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def assert_gone(folder: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while worker_pids(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert worker_pids(folder) == []
