"""The same run, started in the ways people start things: accelerate's file, its launcher, torchrun, several nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from journey import Journey, read_events
from reversing import check_run, write_rows, write_run

# As they circulate: from the time of FSDP1, and as `accelerate config` writes it today. Both offload to the host, which
# has no effect without a GPU (an FSDP2 file given to `train` is in test_accelerate_offload.py).
FSDP1 = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: MistralDecoderLayer
  fsdp_use_orig_params: false
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""


@pytest.fixture
def here(journey: Journey, toy_model: Path) -> Journey:
    """Data and a config for two processes: the same eight rows a step however they are started."""
    write_rows(journey)
    write_run(journey, toy_model, train={"per_device_train_batch_size": 4})
    return journey


def check_two_processes(here: Journey, toy_model: Path) -> Path:
    run = here.only_run()
    assert [event["world_size"] for event in read_events(run, "run_start", rank=1)] == [2]
    check_run(here, run, toy_model)
    return run


@pytest.mark.slow
def test_a_copied_fsdp1_file_trains_with_offload_and_anothers_layer_class(here: Journey, toy_model: Path) -> None:
    (here.folder / "fsdp.yaml").write_text(FSDP1)
    done = here.shardtune("train", "--config", "run.yaml", "--accelerate-config", "fsdp.yaml")
    said = " ".join(done.stdout.split())
    assert "MistralDecoderLayer is read as LlamaDecoderLayer" in said
    assert "no effect" in said and "fsdp_state_dict_type" in said
    run = check_two_processes(here, toy_model)
    assert read_events(run, "plan")[0]["sharding"]["layer_class"] == "LlamaDecoderLayer"


@pytest.mark.slow
def test_accelerate_launch_starts_it_where_it_started_the_script(here: Journey, toy_model: Path) -> None:
    (here.folder / "fsdp.yaml").write_text(FSDP2 + f"main_process_port: {free_port()}\n")
    here.command("accelerate", "launch", "--config_file", "fsdp.yaml", "-m", "shardtune", "train", "run.yaml")
    check_two_processes(here, toy_model)


@pytest.mark.slow
def test_torchrun_starts_it(here: Journey, toy_model: Path) -> None:
    here.command(
        "torchrun", "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(),
        "-m", "shardtune", "train", "run.yaml",
    )  # fmt: skip
    check_two_processes(here, toy_model)


@pytest.mark.slow
def test_three_nodes_meet_by_what_a_wrapper_script_exports(journey: Journey, toy_model: Path) -> None:
    """`export RANK=… MASTER_ADDR=… MASTER_PORT=…` on each machine, and one command for all."""
    write_rows(journey)
    write_run(journey, toy_model, train={"per_device_train_batch_size": 3})
    port = str(free_port())
    command = ["shardtune", "train", "run.yaml", "--nnodes", "3", "--run-id", "three"]
    nodes = [
        {**journey.environment, "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(3)
    ]
    with started(command, nodes, journey.folder) as processes:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    run = journey.only_run()
    assert [event["world_size"] for event in read_events(run, "run_start", rank=2)] == [3]
    check_run(journey, run, toy_model)


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_ends_where_an_undisturbed_run_ends(here: Journey, toy_model: Path) -> None:
    from safetensors.torch import load_file

    settings = ["-o", "train.max_steps=150", "-o", "train.eval_steps=50", "--nproc", "2"]
    command = ["shardtune", "train", "run.yaml", *settings]
    with started(command, [here.environment], here.folder) as (process,):
        wait_for_step(here, 5, process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: every process of the group
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 130, output
    stopped = here.only_run()
    reached = read_events(stopped, "step")[-1]["step"]
    assert 5 <= reached < 150
    done = here.shardtune(*command[1:])
    assert "resuming the unfinished run" in done.stdout
    assert here.only_run() == stopped
    here.shardtune(*command[1:], "-o", "train.output_dir=undisturbed")
    steady = here.only_run("undisturbed")
    adapters = [load_file(run / "final" / "adapter_model.safetensors") for run in (stopped, steady)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all((tensor == adapters[1][name]).all() for name, tensor in adapters[0].items())
    assert check_run(here, stopped, toy_model) == check_run(here, steady, toy_model)


@contextlib.contextmanager
def started(
    command: Sequence[str], environments: Sequence[dict[str, str]], folder: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """The command once in each environment, each in a process group of its own; none outlives the test."""
    processes = [
        subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )
        for environment in environments
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for_step(journey: Journey, step: int, process: subprocess.Popen[str], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        files = list((journey.folder / "runs").glob("*/events-rank0.jsonl"))
        if files and f'"step": {step}' in files[0].read_text(encoding="utf-8"):
            return
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached within {seconds} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
