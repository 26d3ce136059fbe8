"""The doctor on a real card, with the real NVML, NCCL and torch for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import REPOSITORY

from shardtune.doctor.gpu import check_health, check_peer_access, check_visible, check_xids
from shardtune.doctor.job import Job
from shardtune.doctor.nccl_variables import check_variables, known_names
from shardtune.doctor.run import job_for, make_checks
from shardtune.doctor.system import System
from shardtune.doctor.versions import check_cuda
from shardtune.launch.process_role import Node

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_healthy_card_passes() -> None:
    system = System()
    job = job_for(system, None, Node())
    assert (job.device, job.nproc) == ("cuda", torch.cuda.device_count())
    findings = [
        finding for check in (check_visible, check_cuda, check_health, check_xids) for finding in check(system, job)
    ]
    assert "fail" not in {finding.verdict for finding in findings}, findings
    assert {"gpu.visible", "cuda", "gpu.memory errors", "gpu.xid"} <= {finding.check for finding in findings}
    assert f"torch for CUDA {torch.version.cuda}" in next(one.evidence for one in findings if one.check == "cuda")


def test_memory_that_another_process_holds_is_seen() -> None:
    code = "import torch, time; x = torch.empty(3 << 30, dtype=torch.uint8, device='cuda'); print('here', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline().strip() == "here"
            found = [one for one in check_health(System(), Job(device="cuda")) if one.check == "gpu.other processes"]
        finally:
            other.kill()
    assert found and found[0].verdict == "warn" and "GiB" in found[0].evidence


def test_the_names_that_nccl_and_torch_read_are_found_in_their_libraries() -> None:
    names = known_names(System())
    read = {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_ALGO",
            "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_BUFFSIZE",
            "NCCL_CROSS_NIC", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
            "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_FR_BUFFER_SIZE"}  # fmt: skip
    assert not read - names
    assert not {"NCCL_TIMEOUT", "NCCL_IB_CUDA_SUPPORT", "NCCL_TREE_THRESHOLD", "NCCL_LL_THRESHOLD"} & names


def test_a_variable_that_this_nccl_does_not_read_is_reported() -> None:
    system = System(environ={"NCCL_TIMEOUT": "1800", "NCCL_DEBUG": "WARN", "NCCL_IB_HCAS": "mlx5"})
    found = {finding.check: finding for finding in check_variables(system, Job())}
    assert "parallel.step_timeout_minutes" in found["NCCL_TIMEOUT"].fix
    assert found["NCCL_IB_HCAS"].fix == "Did you mean NCCL_IB_HCA?"
    assert found["variables"].verdict == "ok"


def test_quick_checks_of_all_kinds_can_be_made_here() -> None:
    system = System()
    findings = make_checks(system, job_for(system, None, Node()))
    assert not [finding for finding in findings if "not checked: [Errno" in finding.evidence], findings


def test_the_command_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", "doctor", "--json"], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    answer = json.loads(done.stdout)
    print(json.dumps(answer, indent=1))
    if torch.cuda.device_count() > 1:
        assert answer["links"]["backend"] == "nccl" and answer["links"]["transports"]["within a node"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_between_gpus_are_compared(tmp_path: Path) -> None:
    (finding,) = check_peer_access(System(), Job(device="cuda", nproc=2))
    assert finding.verdict in ("ok", "warn")
