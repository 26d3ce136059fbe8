"""The pods that controllers make of our objects: names, ranks, addresses, and who wins when a variable is set twice."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from sample_jobs import KINDS, rich_job, small_job

from shardtune.cluster.controllers import expand
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.pod_plan import PodPlan, expand_references, pod_manifest, resolver, stored_values
from shardtune.cluster.render import render
from shardtune.cluster.schemas import validate
from shardtune.errors import ShardtuneError
from shardtune.launch.process_role import Node, detect_role

STORED = {("Secret", "hub"): {"token": "t"}, ("Secret", "proxy"): {"HTTP_PROXY": "p"}}


def pods(kind: str, nodes: int = 3, **settings: Any) -> list[PodPlan]:
    return expand(render(small_job(nodes, **settings), kind))


def env_of(plan: PodPlan, container: Manifest | None = None) -> dict[str, str]:
    return plan.env({("Secret", "ft-nodes"): {"secret": "s" * 32}}, container)


NAMES = {
    "trainjob": ["ft-node-0-0-xxxxx", "ft-node-0-1-xxxxx", "ft-node-0-2-xxxxx"],
    "pytorchjob": ["ft-master-0", "ft-worker-0", "ft-worker-1"],
    "jobset": ["ft-node-0-0-xxxxx", "ft-node-0-1-xxxxx", "ft-node-0-2-xxxxx"],
    "job": ["ft-0-xxxxx", "ft-1-xxxxx", "ft-2-xxxxx"],
}
MASTERS = {"trainjob": "ft-node-0-0.ft", "pytorchjob": "ft-master-0", "jobset": "ft-node-0-0.ft", "job": "ft-0.ft"}


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_the_names_and_ranks_of_their_controller(kind: str) -> None:
    plans = pods(kind)
    assert [plan.name for plan in plans] == NAMES[kind]
    assert [plan.node_rank for plan in plans] == [0, 1, 2]
    assert [plan.hostname for plan in plans] == [name.removesuffix("-xxxxx") for name in NAMES[kind]]
    assert {plan.subdomain for plan in plans} == ({None} if kind == "pytorchjob" else {"ft"})


@pytest.mark.parametrize("kind", KINDS)
def test_the_masters_address_leads_to_node_0_from_every_pod(kind: str) -> None:
    plans = pods(kind)
    for plan in plans:
        env = env_of(plan)
        address = env.get("PET_MASTER_ADDR", env.get("MASTER_ADDR"))
        assert address == MASTERS[kind]
        assert resolver(plans)[address] is plans[0]
        assert resolver(plans)[f"{address}.default.svc.cluster.local"] is plans[0]


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_the_launcher_finds_its_node_in_the_variables_of_kubeflow(kind: str) -> None:
    port = {"trainjob": 29500, "pytorchjob": 23456}[kind]
    roles = [detect_role(env_of(plan)) for plan in pods(kind)]
    assert roles == [Node(3, rank, MASTERS[kind], port, 8) for rank in range(3)]


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_pods_of_an_indexed_job_have_their_index_the_master_and_the_number_of_nodes(kind: str) -> None:
    for rank, plan in enumerate(pods(kind, init_doctor=True)):
        for container in (plan.container, *plan.init_containers):
            env = env_of(plan, container)
            assert env["JOB_COMPLETION_INDEX"] == str(rank)
            assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (MASTERS[kind], "29500")
            assert env["SHARDTUNE_NODES"] == "3"
            assert not [name for name in env if name.startswith("PET_") or name in ("RANK", "WORLD_SIZE")]


def test_a_pytorchjob_counts_pods_in_rank_and_processes_in_world_size() -> None:
    master, first, second = map(env_of, pods("pytorchjob"))
    assert [one["RANK"] for one in (master, first, second)] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in (master, first, second)} == {"24"}
    assert {one["PET_NNODES"] for one in (master, first, second)} == {"3"}


def test_the_operator_of_pytorchjobs_wins_over_what_the_user_set() -> None:
    plan = pods("pytorchjob", env={"MASTER_ADDR": "mine", "RANK": "9"})[1]
    names = [entry["name"] for entry in plan.container["env"]]
    assert names.count("RANK") == 2  # appended, and the last one counts
    assert env_of(plan)["RANK"] == "1" and env_of(plan)["MASTER_ADDR"] == "ft-master-0"


def test_only_workers_of_a_pytorchjob_wait_for_the_master_and_init_containers_get_no_variables() -> None:
    master, worker, _ = pods("pytorchjob")
    assert [one["name"] for one in master.init_containers] == []
    assert [(one["name"], one["image"]) for one in worker.init_containers] == [("init-pytorch", "alpine:3.10")]
    assert env_of(worker, worker.init_containers[0]) == {}
    assert worker.spec["restartPolicy"] == "OnFailure"


def test_trainer_replaces_its_variables_where_they_are() -> None:
    plan = pods("trainjob", env={"PET_NNODES": "1", "OTHER": "x"})[2]
    names = [entry["name"] for entry in plan.container["env"]]
    assert names.count("PET_NNODES") == 1
    assert env_of(plan)["PET_NNODES"] == "3" and env_of(plan)["PET_NODE_RANK"] == "2"
    assert "RANK" not in env_of(plan) and "MASTER_ADDR" not in env_of(plan)


def test_a_trainjob_without_the_section_trainer_gets_no_variables() -> None:
    manifests = render(small_job(3), "trainjob")
    del manifests.workload["spec"]["trainer"]
    assert [name for name in env_of(expand(manifests)[0]) if name.startswith("PET_")] == []
    assert len(expand(manifests)) == 3  # which would train alone, each


def test_a_trainjob_without_its_label_runs_the_runtime_as_it_is() -> None:
    manifests = render(small_job(3), "trainjob")
    manifests.workload["spec"]["trainer"]["numNodes"] = 5
    (replicated,) = manifests.support[-1]["spec"]["template"]["spec"]["replicatedJobs"]
    assert len(expand(manifests)) == 5
    replicated["template"]["metadata"]["labels"].clear()
    plans = expand(manifests)
    assert len(plans) == 3 and "PET_NNODES" not in env_of(plans[0])


def test_trainer_counts_processes_itself_when_it_is_not_told() -> None:
    manifests = render(small_job(1), "trainjob")
    del manifests.workload["spec"]["trainer"]["numProcPerNode"]
    assert env_of(expand(manifests)[0])["PET_NPROC_PER_NODE"] == "auto"
    resources = manifests.templates["node"]["spec"]["containers"][0]["resources"]
    resources["requests"], resources["limits"] = {"cpu": "3500m"}, {}
    assert env_of(expand(manifests)[0])["PET_NPROC_PER_NODE"] == "4"  # cores, rounded up


@pytest.mark.parametrize("release", ["2.0", "2.2", "2.3"])
def test_the_doctor_of_a_trainjob_sees_the_nodes_as_the_training_does(release: str) -> None:
    for plan in pods("trainjob", init_doctor=True, trainer_release=release):
        (doctor,) = plan.init_containers
        assert env_of(plan, doctor) == env_of(plan)
        assert env_of(plan)["PET_NODE_RANK"] == str(plan.node_rank)


def test_a_trainjob_whose_runtime_is_not_there_is_refused() -> None:
    manifests = render(small_job(2), "trainjob")
    with pytest.raises(ShardtuneError, match="TrainingRuntime 'ft', which is not among"):
        expand([manifests.workload])


@pytest.mark.parametrize("field", ["runtimePatches", "podTemplateOverrides", "podSpecOverrides", "initializer"])
def test_what_would_change_the_pods_in_another_way_is_refused(field: str) -> None:
    manifests = render(small_job(2), "trainjob")
    manifests.workload["spec"][field] = []
    with pytest.raises(ShardtuneError, match=rf"spec\.{field} .* not followed"):
        expand(manifests)


def test_pods_of_an_indexed_job_have_no_names_without_their_service() -> None:
    manifests = render(small_job(2), "job")
    alone = [one for one in manifests if one["kind"] != "Service"]
    assert [plan.dns_names for plan in expand(alone)] == [(), ()]


def test_expanding_changes_nothing_in_the_objects() -> None:
    for kind in KINDS:
        manifests = render(rich_job(3), kind)
        before = deepcopy(list(manifests))
        expand(manifests)
        assert list(manifests) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_has_what_starts_the_container(kind: str) -> None:
    manifests = render(rich_job(3), kind)
    plan = expand(manifests)[2]
    assert plan.command == ["shardtune", "train", "/etc/shardtune/run.yaml", "--run-id", "rich"]
    assert (plan.working_dir, plan.grace_seconds, plan.namespace) == ("/runs", 300, "ml")
    assert plan.resources["limits"]["memory"] == "512Gi"
    assert {mount["mountPath"] for mount in plan.mounts} == {"/dev/shm", "/etc/shardtune", "/models", "/runs"}
    assert plan.volumes["pvc-runs"] == {"persistentVolumeClaim": {"claimName": "runs"}}
    env = plan.env({**stored_values(manifests), **STORED})
    assert (env["HF_TOKEN"], env["HTTP_PROXY"], env["SITE"]) == ("t", "p", "a")
    with pytest.raises(ShardtuneError, match="the Secret 'proxy', which is not given"):
        plan.env(stored_values(manifests))


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_is_a_valid_pod(kind: str) -> None:
    report = validate([pod_manifest(plan) for plan in expand(render(rich_job(3), kind))])
    assert report.problems == () and len(report.checked) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_name_of_a_job_leaves_room_for_a_thousand_nodes(kind: str) -> None:
    manifests = render(small_job(1000), kind)
    longest = "n" * 40
    for one in manifests:
        one["metadata"]["name"] = one["metadata"]["name"].replace("ft", longest)
        if one["kind"] == "TrainJob":
            one["spec"]["runtimeRef"]["name"] = longest
    assert max(len(plan.name) for plan in expand(manifests)) <= 63


def test_references_to_variables_are_expanded_as_the_kubelet_does() -> None:
    values = {"A": "1"}
    assert expand_references("$(A)-$(B)-$$(A)-$A", values) == "1-$(B)-$(A)-$A"


def test_there_must_be_one_workload() -> None:
    with pytest.raises(ShardtuneError, match="There are 0 workloads"):
        expand([{"kind": "ConfigMap"}])
