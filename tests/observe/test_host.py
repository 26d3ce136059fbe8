"""A machine's facts, read from copies of what kernels say."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shardtune.observe.host import describe_host

CPUINFO = """\
processor\t: {0}
model name\t: AMD EPYC 9654 96-Core Processor
physical id\t: {1}
siblings\t: 4
core id\t\t: {2}
cpu cores\t: 2

"""


def machine(root: Path, files: dict[str, str]) -> Path:
    usual = {
        # two sockets, two cores each, two threads a core
        "proc/cpuinfo": "".join(CPUINFO.format(n, n % 4 // 2, n % 2) for n in range(8)),
        "proc/meminfo": "MemTotal:       1056484096 kB\nMemFree:  5 kB\nMemAvailable:   1000000000 kB\n",
    }
    for name, text in {**usual, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_sockets_cores_and_threads_are_counted(tmp_path: Path) -> None:
    cpu = describe_host(machine(tmp_path, {}))["cpu"]
    assert cpu == {"model": "AMD EPYC 9654 96-Core Processor", "sockets": 2, "cores": 4, "threads": 8}


def test_a_container_of_version_2_has_its_own_limits(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": "68719476736\n",
            "sys/fs/cgroup/memory.current": "1234567\n",
        },
    )
    found = describe_host(root)
    assert found["cpu"]["limit"] == 1.5
    assert found["memory"] == {
        "total": 1056484096 * 1024, "available": 1000000000 * 1024, "limit": 68719476736, "used": 1234567
    }  # fmt: skip


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/box\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": "1000000\n",
            "sys/fs/cgroup/kubepods/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/box/memory.max": "5000000\n",
            "sys/fs/cgroup/kubepods/pod1/box/memory.current": "77\n",
            "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "max 100000\n",
        },
    )
    found = describe_host(root)
    assert found["memory"]["limit"] == 1000000
    assert "limit" not in found["cpu"]


def test_version_1_is_read_below_its_controllers_even_when_the_path_is_the_hosts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "8589934592\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    found = describe_host(root)
    assert (found["memory"]["limit"], found["memory"]["used"], found["cpu"]["limit"]) == (8589934592, 4096, 4.0)


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "max"])
def test_no_limit_is_no_fact(tmp_path: Path, unlimited: str) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{unlimited}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    found = describe_host(root)
    assert "limit" not in found["memory"] and "limit" not in found["cpu"]


def test_networks_and_rdma_ports(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    root = machine(
        tmp_path,
        {
            "sys/class/net/eth0/operstate": "up\n", "sys/class/net/eth0/speed": "100000\n", "sys/class/net/eth0/mtu": "9000\n",
            "sys/class/net/ens1/operstate": "down\n", "sys/class/net/ens1/speed": "-1\n",
            "sys/class/net/lo/operstate": "unknown\n", "sys/class/net/veth12/operstate": "up\n",
            f"{port}/state": "4: ACTIVE\n", f"{port}/rate": "400 Gb/sec (4X NDR)\n", f"{port}/link_layer": "InfiniBand\n",
        },
    )  # fmt: skip
    found = describe_host(root)
    assert found["network"] == [
        {"name": "ens1", "state": "down"},
        {"name": "eth0", "state": "up", "megabits": 100000, "mtu": 9000},
    ]
    assert found["rdma"] == [
        {"device": "mlx5_0", "port": "1", "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    ]


def test_a_machine_that_tells_nothing_still_has_a_name(tmp_path: Path) -> None:
    found = describe_host(tmp_path)
    assert found["host"] == socket.gethostname()
    assert not {"memory", "shm", "network", "rdma"} & found.keys()


def test_this_machine_is_read_and_a_folder_that_is_not_there_yet_has_a_disk(tmp_path: Path) -> None:
    found = describe_host(folder=tmp_path / "runs" / "of" / "tomorrow")
    assert found["memory"]["total"] > found["memory"]["available"] > 0
    assert found["disk"]["total"] >= found["disk"]["free"] > 0
    assert found["cpu"]["usable"] >= 1
