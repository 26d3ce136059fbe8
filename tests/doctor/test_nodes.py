"""Several nodes: real ones in network namespaces, and what is made of their reports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from faults.cluster import Cluster, _limit, environment_of_tests, why_no_namespaces
from ranks import free_ports

from shardtune.doctor.collectives import links_of, transports
from shardtune.doctor.compare import clock_skew, differences, judge_links
from shardtune.doctor.finding import NodeReport, ok
from shardtune.doctor.system import System

DOCTOR = [sys.executable, "-m", "shardtune", "doctor"]


def report(node: int, **facts: str) -> NodeReport:
    return NodeReport(
        node, f"host{node}", (ok("x", "y"),), {name.replace("_", " ", 1): value for name, value in facts.items()}
    )


def test_the_node_that_differs_from_most_is_named() -> None:
    reports = [report(0, package_torch="2.12.0", driver="580"), report(1, package_torch="2.13.0", driver="580"),
               report(2, package_torch="2.13.0", driver="570")]  # fmt: skip
    driver, torch = differences(reports)
    assert (driver.verdict, torch.verdict) == ("warn", "fail"), "train refuses other packages"
    assert torch.evidence == "torch is 2.12.0 on node 0 (host0), and 2.13.0 on node 1, 2"
    assert driver.evidence == "driver is 570 on node 2 (host2), and 580 on node 0, 1"
    (setting,) = differences([report(0, **{"setting_train.seed": "a1"}), report(1, **{"setting_train.seed": "b2"})])
    assert setting.verdict == "fail" and "train.seed is another value on node 1 (host1)" in setting.evidence
    assert differences(reports[1:2] * 2) == []


def test_a_clock_is_reported_when_it_is_certainly_wrong() -> None:
    reports = [report(0), report(1), report(2)]
    late, early = clock_skew(reports, {1: (-7.1, -6.9), 2: (59.8, 60.2)})
    assert "node 1 (host1) is 6.9 s behind node 0's" in late.evidence and late.verdict == "warn"
    assert "node 2 (host2) is 59.8 s ahead of node 0's" in early.evidence
    (fine,) = clock_skew(reports, {1: (-30.0, 0.2), 2: (-0.1, 0.1)})  # node 0 was busy for half a minute
    assert fine.verdict == "ok"


def test_every_link_has_its_ranks_and_no_node_is_in_two_pairs_at_a_time() -> None:
    links = links_of([0, 0, 1, 1, 2, 2])
    named = {link.name: [other.ranks for other in links if other.name == link.name] for link in links}
    assert named["all ranks"] == [(0, 1, 2, 3, 4, 5)] and named["within node 1"] == [(2, 3)]
    assert named["node 0 – node 1"] == [(0, 2), (1, 3)] and named["node 2 – node 0"] == [(4, 0), (5, 1)]
    for nodes in ([0, 1, 2], [0, 1, 2, 3], list(range(7)), [0, 0, 1]):
        for phase in range(5):
            busy = [rank for link in links_of(nodes) if link.phase == phase for rank in link.ranks]
            assert len(busy) == len(set(busy))
    assert [link.name for link in links_of([0, 1])] == ["all ranks", "node 0 – node 1"]
    assert [link.name for link in links_of([0, 0])] == ["all ranks", "within node 0"]


NCCL_LOG = """\
a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
a:1:2 [0] NCCL INFO Channel 01/0 : 3[1] -> 0[0] [receive] via NET/IB/12/GDRDMA/Shared
a:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/{net}
b:1:2 [1] NCCL INFO Channel 00 : 2[0] -> 3[1] via SHM/direct/direct
b:1:2 [1] NCCL INFO Channel 02/0 : 2[0] -> 3[1] via SHM/direct/direct
"""


def test_transports_are_read_from_what_nccl_logs(tmp_path: Path) -> None:
    found = transports(NCCL_LOG.format(net="IB/0/GDRDMA"), [0, 0, 1, 1])
    assert found == {"within a node": ["P2P/CUMEM", "SHM"], "between nodes": ["NET/IB/GDRDMA"]}
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    links = {"backend": "nccl", "links": [], "diagnostics": ["[OK] p2p: verified", "[INFO] p2p: GPU 1 failed"],
             "transports": transports(NCCL_LOG.format(net="Socket/0"), [0, 0, 1, 1])}  # fmt: skip
    answers = {one.check: one for one in judge_links(System(root=tmp_path), links)}
    assert "NET/Socket" in answers["links.transport"].evidence and answers["links.transport"].verdict == "warn"
    assert answers["nccl diagnostics"].evidence == "[INFO] p2p: GPU 1 failed"


def test_something_mute_on_the_masters_port_is_not_taken_for_the_master(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {model_name_or_path: gpt2}\ndata: {dataset_name_or_path: rows.jsonl}\nparallel: {join_timeout_minutes: 0.02}\n"
    )
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        command = [
            *DOCTOR,
            config,
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
            "--json",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert (
        finding["check"] == "nodes"
        and "not a shardtune master: it accepts connections and sends nothing" in finding["evidence"]
    )


@pytest.mark.slow
def test_three_nodes_are_compared_and_the_slow_one_with_another_mtu_and_variable_is_named() -> None:
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(f"three nodes need network namespaces, but {reason}")
    with Cluster(3, namespaces=True) as cluster:
        subprocess.run(
            ["ip", "-n", str(cluster.machines[1].namespace), "link", "set", "net0", "mtu", "1400"], check=True
        )
        limited = True
        try:
            for where, device in ((cluster.machines[1].namespace, "net0"), (cluster.hub, "p1")):
                _limit(str(where), device, 400e6)
        except (RuntimeError, FileNotFoundError):
            limited = False
        for machine in cluster.machines:
            environment = {**environment_of_tests(), "OMP_NUM_THREADS": "1"}
            if machine.number == 1:
                environment["NCCL_IB_TIMEOUT"] = "22"
            words = [
                "--nnodes",
                "3",
                "--node-rank",
                str(machine.number),
                "--master-addr",
                cluster.address,
                "--nproc",
                "1",
            ]
            machine.start([*DOCTOR, *words, *(["--json"] if machine.number == 0 else [])], environment)
        assert [cluster.ended(node, 180) for node in range(3)] == [0, 0, 0]
        said = cluster.machines[0].said()
        answer = json.loads(said[said.index("{") :])  # after what was printed to standard error
        told = cluster.machines[2].said()
    assert [node["node"] for node in answer["nodes"]] == [0, 1, 2] and answer["verdict"] == "warn"
    evidence = [finding["evidence"] for finding in answer["findings"]]
    assert any(text.startswith("MTU is 1400 on node 1") for text in evidence)
    assert any(text.startswith("NCCL_IB_TIMEOUT is 22 on node 1") for text in evidence)
    links = {link["link"]: link for link in answer["links"]["links"]}
    assert links.keys() == {"all ranks", "node 0 – node 1", "node 1 – node 2", "node 2 – node 0"}
    assert all(link["all_reduce"] > 0 and link["all_gather"] > 0 for link in links.values())
    if limited:
        assert any("all of them lead to node 1" in text for text in evidence)
    assert "verdict" in told


def test_nodes_with_different_configs_all_fail_and_time_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    (port,) = free_ports(1)
    nodes = []
    for node in (0, 1):
        config = tmp_path / f"{node}.yaml"
        config.write_text(
            f"model: {{model_name_or_path: org/model}}\ndata: {{dataset_name_or_path: org/data}}\ntrain: {{seed: {node}}}\n"
        )
        command = [*DOCTOR, config, "--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1",
                   "--master-port", str(port), "--nproc", "1", "--json"]  # fmt: skip
        nodes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    master, other = map(json.loads, said)
    found = {finding["check"]: finding for finding in master["findings"]}
    assert (
        found["differences"]["verdict"] == "fail"
        and "train.seed is another value on node 1" in found["differences"]["evidence"]
    )
    assert "not timed" in found["links"]["evidence"] and master["links"] is None
    assert other["verdict"] == "fail", "the verdict of all nodes"
