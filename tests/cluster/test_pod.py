"""The pod template says what the settings say, and an overlay changes what no setting covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster.jobs import IMAGE, cluster_job

from shardtune.cluster.pod import merge_overlay, pod_template, support_objects
from shardtune.config.cluster_schema import ClusterSection
from shardtune.errors import UserInputError


def container(template: dict[str, Any]) -> dict[str, Any]:
    return dict(template["spec"]["containers"][0])


RICH: dict[str, Any] = {
    "nodes": 2, "gpus_per_node": 8, "cpu": 32, "cpu_limit": "64", "memory": "512Gi", "memory_limit": "600Gi",
    "ephemeral_storage": "50Gi", "shared_memory": "64Gi", "extended_resources": {"openshift.io/nics": 1},
    "networks": ["ib-a", "ib-b"], "annotations": {"team": "x"}, "labels": {"cost": "y"}, "topology": "rack",
    "volumes": [{"claim": "models", "path": "/models", "read_only": True}, {"claim": "runs.v1", "path": "/runs"},
                {"claim": "models", "path": "/data", "sub_path": "sets"}],
    "env": {"A": "b"}, "secret_env": {"HF_TOKEN": "hub/token"}, "env_from_secrets": ["tracking"],
    "pip_index_url": "https://index.example/simple", "service_account": "trainer", "run_as_uid": 1000,
    "run_as_gid": 0, "fs_group": 2000, "capabilities": ["IPC_LOCK"], "node_selector": {"gpu": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}], "affinity": {"nodeAffinity": {}},
    "topology_spread": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "priority_class": "high", "scheduler_name": "volcano", "working_dir": "/workspace", "grace_seconds": 300,
    "image_pull_policy": "Always", "image_pull_secrets": ["pull"], "queue": "team",
}  # fmt: skip


def test_every_setting_reaches_the_pod(tmp_path: Path) -> None:
    template = pod_template(cluster_job(tmp_path, **RICH))
    spec, main = template["spec"], container(template)
    assert main["resources"] == {
        "requests": {
            "cpu": "32",
            "memory": "512Gi",
            "ephemeral-storage": "50Gi",
            "openshift.io/nics": "1",
            "nvidia.com/gpu": "8",
        },
        "limits": {
            "cpu": "64",
            "memory": "600Gi",
            "ephemeral-storage": "50Gi",
            "openshift.io/nics": "1",
            "nvidia.com/gpu": "8",
        },
    }
    assert template["metadata"]["annotations"] == {
        "team": "x", "k8s.v1.cni.cncf.io/networks": "ib-a, ib-b", "kueue.x-k8s.io/podset-required-topology": "rack",
    }  # fmt: skip
    assert template["metadata"]["labels"]["cost"] == "y"
    assert [volume["name"] for volume in spec["volumes"]] == ["shm", "config", "pvc-models", "pvc-runs-v1"]
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert {mount["mountPath"]: mount for mount in main["volumeMounts"]} == {
        "/dev/shm": {"name": "shm", "mountPath": "/dev/shm"},
        "/etc/shardtune": {"name": "config", "mountPath": "/etc/shardtune", "readOnly": True},
        "/models": {"name": "pvc-models", "mountPath": "/models", "readOnly": True},
        "/runs": {"name": "pvc-runs-v1", "mountPath": "/runs"},
        "/data": {"name": "pvc-models", "mountPath": "/data", "subPath": "sets"},
    }
    env = {one["name"]: one for one in main["env"]}
    assert env["A"]["value"] == "b" and env["PIP_INDEX_URL"]["value"] == "https://index.example/simple"
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert main["envFrom"] == [{"secretRef": {"name": "tracking"}}]
    assert spec["securityContext"] == {"runAsUser": 1000, "runAsGroup": 0, "fsGroup": 2000}
    assert main["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert (main["image"], main["imagePullPolicy"], main["workingDir"]) == (IMAGE, "Always", "/workspace")
    plain = {
        "serviceAccountName": "trainer", "nodeSelector": {"gpu": "h200"}, "priorityClassName": "high",
        "schedulerName": "volcano", "terminationGracePeriodSeconds": 300, "imagePullSecrets": [{"name": "pull"}],
        "tolerations": RICH["tolerations"], "affinity": RICH["affinity"], "topologySpreadConstraints": RICH["topology_spread"],
    }  # fmt: skip
    assert {key: spec[key] for key in plain} == plain


def test_the_rich_job_sets_every_setting_that_a_pod_can_have() -> None:
    """A setting that is added later must be added to RICH, or to those that the pod does not carry."""
    elsewhere = {
        "target", "profile", "context", "namespace", "job_name", "gpu", "gpu_resource", "image", "rdma",
        "gang_scheduling", "restarts", "max_hours", "keep_hours", "command", "init_doctor", "pod_overlay",
        "trainer_release", "runai_project", "runai_submit", "runai_kind", "sbatch",
    }  # fmt: skip
    assert set(ClusterSection.model_fields) - elsewhere == set(RICH)


def test_nodes_share_a_secret_that_is_named_and_never_written(tmp_path: Path) -> None:
    job = cluster_job(tmp_path, nodes=2)
    secret = next(one for one in support_objects(job) if one["kind"] == "Secret")
    assert secret["stringData"] == {"secret": ""} and secret["metadata"]["name"] == "ft-nodes"
    env = {one["name"]: one for one in container(pod_template(job))["env"]}
    assert env["SHARDTUNE_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": "ft-nodes", "key": "secret"}


def test_one_node_and_nodes_with_a_secret_of_their_own_get_none(tmp_path: Path) -> None:
    for settings in ({"nodes": 1}, {"nodes": 2, "secret_env": {"SHARDTUNE_SECRET": "mine/key"}}):
        kinds = [one["kind"] for one in support_objects(cluster_job(tmp_path, **settings))]
        assert kinds == ["ConfigMap"]


def test_an_overlay_is_merged_last_by_name(tmp_path: Path) -> None:
    overlay = {
        "metadata": {"annotations": {"added": "1"}},
        "spec": {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": None,
            "containers": [
                {"name": "trainer", "env": [{"name": "A", "value": "other"}], "tty": True},
                {"name": "side"},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }
    template = pod_template(cluster_job(tmp_path, env={"A": "b", "C": "d"}, pod_overlay=overlay), container="pytorch")
    spec, main = template["spec"], container(template)
    assert [one["name"] for one in spec["containers"]] == ["pytorch", "side"] and main["tty"] is True
    env = {one["name"]: one["value"] for one in main["env"] if "value" in one}
    assert (env["A"], env["C"], spec["hostNetwork"]) == ("other", "d", True)
    assert [one["name"] for one in spec["volumes"]] == ["shm", "config", "scratch"]
    assert "terminationGracePeriodSeconds" not in spec and template["metadata"]["annotations"]["added"] == "1"


@pytest.mark.parametrize(
    ("base", "overlay", "merged"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"tolerations": [1]}, {"tolerations": [2]}, {"tolerations": [2]}),
        (
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "value": "2"}]},
            {"env": [{"name": "A", "value": "2"}]},
        ),
    ],
)
def test_overlay_rules(base: Any, overlay: Any, merged: Any) -> None:
    assert merge_overlay(base, overlay) == merged


@pytest.mark.parametrize(
    "overlay", [{"spec": None}, {"spec": {"containers": None}}, {"metadata": None}, {"metadata": {"labels": None}}]
)
def test_an_overlay_cannot_remove_what_a_job_cannot_do_without(tmp_path: Path, overlay: dict[str, Any]) -> None:
    with pytest.raises(UserInputError, match="is null, which would remove"):
        pod_template(cluster_job(tmp_path, pod_overlay=overlay))
