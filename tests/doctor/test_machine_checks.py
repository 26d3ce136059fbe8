"""Limits, networks, memory and disks, on machines that are folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doctor.machines import USER, config, found, limits, machine, needs
from small_disk import fill, small_disk

from shardtune.doctor.job import Job
from shardtune.doctor.limits import check_memlock, check_shm
from shardtune.doctor.memory import check_memory, check_processes
from shardtune.doctor.network import check_hca, check_interfaces, check_master_name, check_rdma, matches
from shardtune.doctor.storage import _not_writable, check_grace, check_output, check_paths, check_read_speed
from shardtune.doctor.system import Space, System
from shardtune.launch.process_role import Node

PORT = "sys/class/infiniband/mlx5_{0}/ports/1/"
TWO_NODES = Job(node=Node(2, 1, "10.0.0.1", 29500), nproc=8, device="cuda")


def rdma(state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", number: int = 0) -> dict[str, str]:
    place = PORT.format(number)
    return {
        f"{place}state": state,
        f"{place}phys_state": "5: LinkUp",
        f"{place}rate": rate,
        "dev/infiniband/uverbs0": "",
    }


def interface(name: str, state: str = "up") -> dict[str, str]:
    return {f"sys/class/net/{name}/operstate": state, f"sys/class/net/{name}/flags": "0x1003"}


def test_little_locked_memory_is_a_warning_only_where_there_is_rdma_to_lose(tmp_path: Path) -> None:
    poor = {"proc/self/status": USER, "proc/self/limits": limits("8388608")}
    verdict, text = found(check_memlock, machine(tmp_path / "a", {**poor, **rdma()}))["memlock"]
    assert verdict == "warn" and "(uid 2000) may lock 8 MiB" in text and "falls back to TCP" in text
    assert "IPC_LOCK in a manifest has no effect" in text
    assert found(check_memlock, machine(tmp_path / "b", poor))["memlock"][0] == "ok"
    capable = {**rdma(), "proc/self/limits": limits("8388608")}  # and all capabilities
    assert "CAP_IPC_LOCK is effective" in found(check_memlock, machine(tmp_path / "c", capable))["memlock"][1]
    required = machine(tmp_path / "d", {**poor, **rdma()}, environ={"NCCL_NET": "IB"})
    assert found(check_memlock, required, TWO_NODES)["memlock"][0] == "fail"


def test_this_process_has_its_own_limits() -> None:
    assert found(check_memlock, System())["memlock"][0] in ("ok", "warn")


def test_shared_memory_is_compared_with_what_workers_and_nccl_need(tmp_path: Path) -> None:
    docker = machine(tmp_path, space=Space(64 << 20, 64 << 20))
    assert found(check_shm, docker)["shm"][0] == "ok"
    workers = Job(config(train={"dataloader_num_workers": 4}), nproc=2)
    verdict, text = found(check_shm, docker, workers)["shm"]
    assert verdict == "warn" and "64 MiB" in text and "4 data workers" in text and "dataloader_num_workers: 0" in text
    assert "NCCL may need 512 MiB" in found(check_shm, docker, TWO_NODES)["shm"][1]
    planned = Job(needs=needs(0, 70 << 20, 0, 0))
    assert found(check_shm, docker, planned)["shm"][0] == "warn"


def test_rdma_ports_are_up_of_one_rate_and_reachable_from_the_container(tmp_path: Path) -> None:
    assert found(check_rdma, machine(tmp_path / "a", rdma()))["rdma"] == ("ok", "mlx5_0:1 400 Gb/sec (4X NDR) → ")
    down = machine(tmp_path / "b", {**rdma(), **rdma("1: DOWN", number=1)})
    assert "mlx5_1:1 (DOWN, LinkUp); up: mlx5_0:1" in found(check_rdma, down)["rdma"][1]
    slow = machine(tmp_path / "c", {**rdma(), **rdma(rate="100 Gb/sec (4X EDR)", number=1)})
    assert found(check_rdma, slow)["rdma"][0] == "warn"
    files = {name: text for name, text in rdma().items() if "uverbs" not in name}
    assert found(check_rdma, machine(tmp_path / "d", files))["rdma.access"][0] == "warn"
    assert found(check_rdma, machine(tmp_path / "e")) == {}


@pytest.mark.parametrize(
    ("setting", "fits"),
    [("eth", {"eth0", "eth1"}), ("=eth0", {"eth0"}), ("^lo", {"eth0", "eth1", "ib0"}), ("^=eth0", {"eth1", "ib0", "lo"}),
     ("ib,=x", {"ib0"}), ("eth1,ib0", {"eth1", "ib0"}), ("en", set())],
)  # fmt: skip
def test_interfaces_match_by_the_rules_of_nccl(setting: str, fits: set[str]) -> None:
    assert {name for name in ("eth0", "eth1", "ib0", "lo") if matches(setting, name)} == fits


def test_an_interface_that_a_setting_names_exists_is_up_and_leads_to_the_master(tmp_path: Path) -> None:
    files = {**interface("eth0"), **interface("eth1"), **interface("eth2", "down")}

    def answer(job: Job = TWO_NODES, **environ: str) -> dict[str, tuple[str, str]]:
        address = {"eth0": "10.0.0.2", "eth2": "10.0.2.2"}
        return found(check_interfaces, machine(
            tmp_path, files, environ=environ, ipv4=address, interface_to=lambda host: "eth0"), job)  # fmt: skip

    conf = machine(tmp_path / "conf", {**files, "etc/nccl.conf": "NCCL_SOCKET_IFNAME = bond0\n"})
    assert found(check_interfaces, conf, TWO_NODES)["NCCL_SOCKET_IFNAME"][0] == "fail"
    assert answer(NCCL_SOCKET_IFNAME="=eth0")["NCCL_SOCKET_IFNAME"] == ("ok", "eth0 (10.0.0.2) → ")
    verdict, text = answer(NCCL_SOCKET_IFNAME="bond0")["NCCL_SOCKET_IFNAME"]
    assert verdict == "fail" and "names no interface" in text and "eth0, eth1, eth2" in text
    assert answer(Job(), NCCL_SOCKET_IFNAME="bond0")["NCCL_SOCKET_IFNAME"][0] == "warn", "a CPU run does not read it"
    assert answer(Job(), GLOO_SOCKET_IFNAME="eth")["GLOO_SOCKET_IFNAME"][0] == "fail", "gloo knows no prefixes"
    assert "no address" in answer(NCCL_SOCKET_IFNAME="eth1")["NCCL_SOCKET_IFNAME"][1]
    assert answer(NCCL_SOCKET_IFNAME="eth2")["NCCL_SOCKET_IFNAME"][0] == "fail"
    files.update(interface("eth2"))
    assert "the master is reached by eth0" in answer(NCCL_SOCKET_IFNAME="eth2")["NCCL_SOCKET_IFNAME"][1]


def test_loopback_of_this_machine_is_an_interface_that_is_up() -> None:
    real = System(environ={"GLOO_SOCKET_IFNAME": "lo"})
    verdict, text = found(check_interfaces, real)["GLOO_SOCKET_IFNAME"]
    assert verdict == "ok" and "127.0.0.1" in text


def test_nccl_ib_hca_names_a_device_that_exists(tmp_path: Path) -> None:
    assert found(check_hca, machine(tmp_path, rdma(), environ={"NCCL_IB_HCA": "=mlx5_0:1"})) == {}
    assert "uses TCP" in found(check_hca, machine(tmp_path, rdma(), environ={"NCCL_IB_HCA": "mlx4"}))["NCCL_IB_HCA"][1]
    forced = machine(tmp_path / "b", environ={"NCCL_NET": "IB"})
    assert found(check_hca, forced, TWO_NODES)["NCCL_NET"][0] == "fail"


def test_the_masters_name_is_resolved() -> None:
    assert "127.0.0.1" in found(check_master_name, System(), Job(node=Node(2, 1, "localhost")))["master.dns"][1]
    verdict, text = found(check_master_name, System(), Job(node=Node(2, 1, "no-such-host.invalid")))["master.dns"]
    assert verdict == "warn" and "does not resolve" in text
    assert found(check_master_name, System()) == {}


def test_host_memory_is_compared_with_the_plan(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod\n", "proc/meminfo": "MemAvailable: 900000000 kB\n", "sys/fs/cgroup/pod/memory.max": str(8 << 30),
        "sys/fs/cgroup/pod/memory.current": str(6 << 30), "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/pod/memory.events": "oom_kill 3\n",
    }  # fmt: skip
    pod = machine(tmp_path, files)
    answer = found(check_memory, pod)
    assert "8 GiB for this process, 2 GiB available" in answer["host memory"][1]
    assert answer["oom kills"][0] == "warn" and "3 processes" in answer["oom kills"][1]
    assert found(check_memory, pod, Job(needs=needs(9 << 30), device="cuda"))["host memory"][0] == "fail"
    assert found(check_memory, pod, Job(needs=needs(4 << 30, 0, 0, 0)))["host memory"][0] == "warn"


def test_more_processes_than_the_machine_can_run_fail() -> None:
    assert "cannot run 20000 processes" in found(check_processes, System(), Job(nproc=20_000))["processes"][1]
    assert found(check_processes, System(), Job(nproc=2)) == {}


@pytest.mark.parametrize(
    ("folder", "environ", "words"),
    [("/scratch/runs", {}, "is on tmpfs, which is memory"), ("/data/runs", {}, None), ("/layer/runs", {}, None),
     ("/layer/runs", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "is a layer of the container")],
)  # fmt: skip
def test_an_output_that_would_be_lost_is_a_warning(
    tmp_path: Path, folder: str, environ: dict[str, str], words: str | None
) -> None:
    answer = found(check_output, machine(tmp_path, environ=environ), Job(config(train={"output_dir": folder})))
    assert answer["output.space"][0] == "ok"
    assert (words is None and "output.file system" not in answer) or words in answer["output.file system"][1]


def test_a_full_disk_at_the_output_fails_and_a_small_one_is_a_warning(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 400) as disk:
        job = Job(config(train={"output_dir": str(disk / "runs")}), needs=needs(0, 0, 0, 1 << 20))
        verdict, text = found(check_output, System(), job)["output.space"]
        assert verdict == "warn" and "the checkpoints need about 1 MiB" in text and "tmpfs" in text
        fill(disk)
        assert found(check_output, System(), job)["output.space"][0] == "fail"


def test_the_models_files_are_read_and_a_slow_disk_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(os.urandom(40 << 20))
    fast = config(model={"model_name_or_path": str(tmp_path)})
    verdict, text = found(check_read_speed, System(), Job(fast))["model.read speed"]
    assert verdict == "ok" and "40 MiB of weights" in text and "past the page cache" in text
    slow = config(model={"model_name_or_path": str(tmp_path)}, parallel={"load_timeout_minutes": 1e-9})
    assert found(check_read_speed, System(), Job(slow))["model.read speed"][0] == "warn"


def test_a_save_is_compared_with_the_grace_period(tmp_path: Path) -> None:
    job = Job(config(train={"output_dir": str(tmp_path / "runs")}), needs=needs(0, 0, 1 << 20, 0), grace=30)
    assert found(check_grace, System(), job)["grace period"][0] == "ok"
    verdict, text = found(check_grace, System(), Job(job.config, needs=needs(0, 0, 1 << 50, 0), grace=30))[
        "grace period"
    ]
    assert verdict == "warn" and "terminationGracePeriodSeconds" in text
    assert list(tmp_path.iterdir()) == [], "the file it wrote is gone"


def test_a_model_that_is_not_there_fails(tmp_path: Path) -> None:
    job = Job(config(model={"model_name_or_path": str(tmp_path / "none")}))
    verdict, text = found(check_paths, System(), job)["paths"]
    assert verdict == "fail" and "does not exist" in text


def test_an_output_folder_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert _not_writable(tmp_path / "new" / "runs") is None
    assert _not_writable(tmp_path / "file" / "runs") == f"{tmp_path / 'file'} is a file"
