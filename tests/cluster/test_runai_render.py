"""What Run:ai gets: a manifest for its scheduler, or the arguments of its command in two generations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from described_jobs import job_with

from shardtune.cluster.render_job import render_job
from shardtune.cluster.render_pytorchjob import render_pytorchjob
from shardtune.cluster.render_runai import Generation, namespace_warning, render_runai, runai_argv, runai_support
from shardtune.cluster.spec import ClusterJob
from shardtune.errors import UserInputError

BOTH: list[Generation] = ["cli", "cli-2.20"]
SITE: dict[str, Any] = {
    "runai_project": "ml",
    "image": "registry.example.com/shardtune@sha256:abc",
    "nodes": 3,
    "gpus_per_node": 8,
    "cpu": "500m",
    "cpu_limit": "32",
    "memory": "256Gi",
    "extended_resources": {"openshift.io/mellanoxnics": "1"},
    "networks": ["ml/ib0"],
    "annotations": {"note": "a b", "kai.scheduler/node-pools": "h200 h100"},
    "labels": {"team": "nlp"},
    "volumes": [{"claim": "models", "path": "/models"}, {"claim": "runs", "path": "/runs"}],
    "env": {"NCCL_DEBUG": "WARN", "GREETING": "it's $HOME; rm -rf"},
    "secret_env": {"HF_TOKEN": "hub/token"},
    "run_as_uid": 2000,
    "run_as_gid": 3000,
    "capabilities": ["IPC_LOCK"],
    "node_selector": {"run.ai/type": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}],
    "topology": "rack",
    "restarts": 4,
    "keep_hours": 2,
    "working_dir": "/runs",
    "image_pull_policy": "Always",
}


def values(argv: list[str], flag: str) -> list[str]:
    """All values of a flag, before the container's command."""
    own = argv[: argv.index("--")]
    return [own[index + 1] for index, word in enumerate(own) if word == flag]


@pytest.mark.parametrize("generation", BOTH)
def test_the_command_says_all_that_the_section_says(tmp_path: Path, generation: Generation) -> None:
    argv = runai_argv(job_with(tmp_path, **SITE), generation)
    assert argv[:5] == ["runai", "training", "pytorch", "submit", "ft"]
    expected = {
        "--project": ["ml"],
        "--image": ["registry.example.com/shardtune@sha256:abc"],
        "--image-pull-policy": ["Always"],
        "--workers": ["2"],
        "--gpu-devices-request": ["8"],
        "--cpu-core-request": ["0.5"],
        "--cpu-core-limit": ["32"],
        "--cpu-memory-request": ["256Gi"],
        "--cpu-memory-limit": ["256Gi"],
        "--extended-resource": ["openshift.io/mellanoxnics=1"],
        "--annotation": ["note=a b", "k8s.v1.cni.cncf.io/networks=ml/ib0"],
        "--existing-pvc": ["claimname=models,path=/models", "claimname=runs,path=/runs"],
        "--configmap-map-volume": ["name=ft-config,path=/etc/shardtune"],
        "--run-as-uid": ["2000"],
        "--run-as-gid": ["3000"],
        "--capability": ["IPC_LOCK"],
        "--node-type": ["h200"],
        "--node-pools": ["h200", "h100"],
        "--toleration": ["operator=Equal,key=gpu,value=yes,effect=NoSchedule"],
        "--required-pod-topology-key": ["rack"],
        "--backoff-limit": ["13"],
        "--auto-deletion-time-after-completion": ["7200s"],
        "--working-dir": ["/runs"],
    }
    assert {flag: values(argv, flag) for flag in expected} == expected
    assert "team=nlp" in values(argv, "--label")
    assert "--large-shm" in argv
    assert argv[argv.index("--command") :] == [
        "--command", "--", "shardtune", "train", "/etc/shardtune/run.yaml", "--run-id", "ft",
    ]  # fmt: skip


@pytest.mark.parametrize(("restarts", "limit"), [(0, "0"), (2, "7")])
def test_the_command_limits_restarts_as_the_manifest_does(tmp_path: Path, restarts: int, limit: str) -> None:
    job = job_with(tmp_path, **{**SITE, "restarts": restarts, "topology": None})
    assert values(runai_argv(job, "cli"), "--backoff-limit") == [limit]
    policy = render_runai(job, render_pytorchjob).workload["spec"]["runPolicy"]
    assert str(policy.get("backoffLimit", 0)) == limit


@pytest.mark.parametrize(("namespace", "warned"), [(None, False), ("runai-ml", False), ("elsewhere", True)])
def test_a_namespace_that_is_not_the_projects_usual_one_is_warned_of(
    tmp_path: Path, namespace: str | None, warned: bool
) -> None:
    warning = namespace_warning(job_with(tmp_path, **SITE, namespace=namespace))
    assert (warning is not None) == warned
    assert warning is None or ("elsewhere" in warning and "runai-ml" in warning)


@pytest.mark.parametrize("generation", BOTH)
def test_variables_are_passed_with_the_flag_that_means_the_same_in_both_generations(
    tmp_path: Path, generation: Generation
) -> None:
    argv = runai_argv(job_with(tmp_path, **SITE), generation)
    assert "GREETING=it's $HOME; rm -rf" in values(argv, "-e"), "one argument, which no shell reads"
    assert not {"--environment", "--environment-variable"} & set(argv)


def test_secrets_are_named_as_each_generation_names_them(tmp_path: Path) -> None:
    job = job_with(tmp_path, **SITE)
    assert values(runai_argv(job, "cli"), "--env-secret") == [
        "HF_TOKEN=hub,key=token", "SHARDTUNE_SECRET=ft-nodes,key=secret",
    ]  # fmt: skip
    old = values(runai_argv(job, "cli-2.20"), "-e")
    assert "HF_TOKEN=SECRET:hub,token" in old
    assert "SHARDTUNE_SECRET=SECRET:ft-nodes,secret" in old


def test_one_node_has_no_workers_and_no_secret(tmp_path: Path) -> None:
    argv = runai_argv(job_with(tmp_path, **{**SITE, "nodes": 1}), "cli")
    assert "--workers" not in argv
    assert values(argv, "--env-secret") == ["HF_TOKEN=hub,key=token"]


def test_release_2_20_has_no_grace_period_so_the_run_is_told_what_it_really_gets(tmp_path: Path) -> None:
    job = job_with(tmp_path, **SITE)
    today, old = runai_argv(job, "cli"), runai_argv(job, "cli-2.20")
    assert values(today, "--termination-grace-period") == [f"{job.grace_seconds}s"]
    assert f"SHARDTUNE_GRACE_SECONDS={job.grace_seconds}" in values(today, "-e")
    assert "--termination-grace-period" not in old
    assert "SHARDTUNE_GRACE_SECONDS=30" in values(old, "-e")


def test_a_size_of_shared_memory_is_a_volume_today_and_refused_by_release_2_20(tmp_path: Path) -> None:
    job = job_with(tmp_path, **SITE, shared_memory="16Gi")
    argv = runai_argv(job, "cli")
    assert values(argv, "--empty-dir-volume") == ["name=shm,path=/dev/shm,medium=Memory,size-limit=16Gi"]
    assert "--large-shm" not in argv
    with pytest.raises(UserInputError, match=r"release 2\.20 cannot express cluster\.shared_memory"):
        runai_argv(job, "cli-2.20")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("service_account", "trainer"),
        ("affinity", {"nodeAffinity": {}}),
        ("topology_spread", [{"maxSkew": 1}]),
        ("pod_overlay", {"spec": {"hostIPC": True}}),
        ("image_pull_secrets", ["registry"]),
        ("env_from_secrets", ["all"]),
        ("fs_group", 1000),
        ("ephemeral_storage", "50Gi"),
        ("max_hours", 5),
        ("init_doctor", True),
        ("queue", "team"),
        ("gang_scheduling", "volcano"),
        ("scheduler_name", "other"),
        ("node_selector", {"zone": "a"}),
        ("priority_class", "urgent"),
        ("volumes", [{"claim": "models", "path": "/models", "read_only": True}]),
    ],
)
def test_what_the_command_cannot_express_is_refused_by_name_with_the_manifest_as_the_alternative(
    tmp_path: Path, setting: str, value: Any
) -> None:
    with pytest.raises(UserInputError) as refused:
        runai_argv(job_with(tmp_path, **{**SITE, setting: value}), "cli")
    assert f"cluster.{setting}" in refused.value.what
    assert "cluster.runai_submit: manifest" in refused.value.fix


def test_all_refused_settings_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as refused:
        runai_argv(job_with(tmp_path, **SITE, service_account="a", max_hours=3), "cli")
    assert "cluster.service_account, cluster.max_hours" in refused.value.what


def test_priority_is_a_flag_today_only(tmp_path: Path) -> None:
    job = job_with(tmp_path, **SITE, priority_class="high")
    assert values(runai_argv(job, "cli"), "--priority") == ["high"]
    with pytest.raises(UserInputError, match=r"cluster\.priority_class"):
        runai_argv(job, "cli-2.20")


def test_another_vendors_gpus_are_an_extended_resource(tmp_path: Path) -> None:
    argv = runai_argv(job_with(tmp_path, **{**SITE, "gpu_resource": "amd.com/gpu"}), "cli")
    assert "amd.com/gpu=8" in values(argv, "--extended-resource")
    assert "--gpu-devices-request" not in argv


@pytest.mark.parametrize("missing", ["runai_project", "image"])
def test_a_project_and_an_image_are_needed(tmp_path: Path, missing: str) -> None:
    with pytest.raises(UserInputError, match=f"cluster.{missing} is not set"):
        runai_argv(job_with(tmp_path, **{**SITE, missing: None}), "cli")


def test_what_the_command_refers_to_is_made_in_the_projects_namespace(tmp_path: Path) -> None:
    objects = runai_support(job_with(tmp_path, **SITE))
    assert [(one["kind"], one["metadata"]["name"]) for one in objects] == [
        ("ConfigMap", "ft-config"),
        ("Secret", "ft-nodes"),
    ]
    assert {one["metadata"]["namespace"] for one in objects} == {"runai-ml"}
    assert objects[1]["stringData"] == {"secret": ""}


# --- the manifest ---------------------------------------------------------------------------------------------------

PLAIN = {"runai_project": "ml", "image": "i", "nodes": 2, "gpus_per_node": 8}


def pods(job: ClusterJob) -> dict[str, Any]:
    return dict(render_runai(job, render_job).templates["node"])


def test_a_manifest_has_the_scheduler_the_namespace_and_the_queue_of_the_project(tmp_path: Path) -> None:
    manifests = render_runai(job_with(tmp_path, **PLAIN), render_job)
    assert {one["metadata"]["namespace"] for one in manifests} == {"runai-ml"}
    template = manifests.templates["node"]
    assert template["spec"]["schedulerName"] == "runai-scheduler"
    for labels in (manifests.workload["metadata"]["labels"], template["metadata"]["labels"]):
        assert (labels["project"], labels["runai/queue"]) == ("ml", "ml")


def test_a_namespace_of_its_own_and_the_priority_are_kept(tmp_path: Path) -> None:
    manifests = render_runai(job_with(tmp_path, **PLAIN, namespace="nlp", priority_class="high"), render_job)
    assert manifests.workload["metadata"]["namespace"] == "nlp"
    assert manifests.workload["metadata"]["labels"]["priorityClassName"] == "high"
    assert manifests.templates["node"]["spec"]["priorityClassName"] == "high"


def test_the_scheduler_without_the_platform_reads_another_label(tmp_path: Path) -> None:
    template = pods(job_with(tmp_path, **PLAIN, scheduler_name="kai-scheduler"))
    assert template["spec"]["schedulerName"] == "kai-scheduler"
    assert template["metadata"]["labels"]["kai.scheduler/queue"] == "ml"
    assert "runai/queue" not in template["metadata"]["labels"]


def test_a_users_own_label_wins(tmp_path: Path) -> None:
    assert (
        pods(job_with(tmp_path, **PLAIN, labels={"runai/queue": "ml-h200"}))["metadata"]["labels"]["runai/queue"]
        == "ml-h200"
    )


@pytest.mark.parametrize(
    ("setting", "value"), [("queue", "team"), ("gang_scheduling", "volcano"), ("topology", "rack")]
)
def test_what_run_ai_does_itself_is_refused_in_a_manifest(tmp_path: Path, setting: str, value: str) -> None:
    with pytest.raises(UserInputError, match=f"cluster.{setting}"):
        render_runai(job_with(tmp_path, **PLAIN, **{setting: value}), render_job)


def test_a_manifest_needs_a_project(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="runai_project is not set"):
        render_runai(job_with(tmp_path, image="i"), render_job)
