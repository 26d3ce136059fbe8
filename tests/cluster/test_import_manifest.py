"""A PyTorchJob, TrainJob, JobSet or Job becomes a section `cluster`, and every field gets a verdict."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from described_jobs import RUN, job_with
from running import Command

from shardtune.cluster.import_command import local_script
from shardtune.cluster.import_manifest import import_manifest
from shardtune.cluster.import_report import Imported, ImportVerdict, as_yaml
from shardtune.cluster.render_job import render_job
from shardtune.cluster.spec import make_job
from shardtune.config import load_config
from shardtune.errors import UserInputError

TEMPLATE: dict[str, Any] = {
    "metadata": {
        "labels": {"team": "nlp"},
        "annotations": {"k8s.v1.cni.cncf.io/networks": "ml/ib0, ml/ib1", "note": "x"},
    },
    "spec": {
        "restartPolicy": "OnFailure",
        "serviceAccountName": "trainer",
        "priorityClassName": "high",
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "terminationGracePeriodSeconds": 30,
        "hostIPC": True,
        "securityContext": {"runAsUser": 2000, "fsGroup": 3000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "pytorch",
                "image": "reg/i:1",
                "command": ["bash", "-c"],
                "args": ["pip install trl && torchrun train.py"],
                "workingDir": "/work",
                "ports": [{"containerPort": 23456}],
                "env": [
                    {"name": "NCCL_DEBUG", "value": "WARN"},
                    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
                    {"name": "WANDB_API_KEY", "value": "value1234"},
                    {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "envFrom": [{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "settings"}}],
                "resources": {
                    "requests": {"cpu": "16", "memory": "64Gi"},
                    "limits": {"memory": "96Gi", "nvidia.com/gpu": 8, "rdma/hca": 1},
                },
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "privileged": True},
                "volumeMounts": [
                    {"name": "shm", "mountPath": "/dev/shm"},
                    {"name": "runs", "mountPath": "/runs", "subPath": "me"},
                    {"name": "models", "mountPath": "/models", "readOnly": True},
                    {"name": "scripts", "mountPath": "/scripts"},
                    {"name": "lost", "mountPath": "/lost"},
                ],
                "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
            },
            {"name": "sidecar", "image": "s"},
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": "runs-claim"}},
            {"name": "models", "persistentVolumeClaim": {"claimName": "models-claim"}},
            {"name": "scripts", "configMap": {"name": "scripts"}},
        ],
    },
}
FROM_TEMPLATE: dict[str, Any] = {
    "image": "reg/i:1",
    "working_dir": "/work",
    "networks": ["ml/ib0", "ml/ib1"],
    "annotations": {"note": "x"},
    "labels": {"team": "nlp"},
    "service_account": "trainer",
    "priority_class": "high",
    "node_selector": {"zone": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "image_pull_secrets": ["registry"],
    "env": {"NCCL_DEBUG": "WARN"},
    "secret_env": {"HF_TOKEN": "hub/token", "WANDB_API_KEY": "training-secrets/WANDB_API_KEY"},
    "env_from_secrets": ["all"],
    "gpus_per_node": 8,
    "extended_resources": {"rdma/hca": "1"},
    "rdma": "infiniband",
    "cpu": "16",
    "memory": "64Gi",
    "memory_limit": "96Gi",
    "shared_memory": "32Gi",
    "capabilities": ["IPC_LOCK"],
    "volumes": [
        {"claim": "runs-claim", "path": "/runs", "sub_path": "me"},
        {"claim": "models-claim", "path": "/models", "read_only": True},
    ],
    "pod_overlay": {
        "spec": {
            "containers": [
                {
                    "name": "trainer",
                    "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
                    "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}],
                    "securityContext": {"privileged": True},
                    "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
                },
                {"name": "sidecar", "image": "s"},
            ],
            "volumes": [{"name": "scripts", "configMap": {"name": "scripts"}}],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "hostIPC": True,
        }
    },
}


def pytorch_job(workers: int = 2) -> dict[str, Any]:
    replica = {"replicas": 1, "restartPolicy": "OnFailure", "template": copy.deepcopy(TEMPLATE)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "ft", "namespace": "ml", "labels": {"kueue.x-k8s.io/queue-name": "team", "team": "nlp"}},
        "spec": {
            "nprocPerNode": "8",
            "runPolicy": {
                "backoffLimit": 3,
                "ttlSecondsAfterFinished": 7200,
                "activeDeadlineSeconds": 36000,
                "cleanPodPolicy": "None",
            },
            "pytorchReplicaSpecs": {"Master": replica, "Worker": {**copy.deepcopy(replica), "replicas": workers}},
        },
    }


def imported(*documents: dict[str, Any], keep_uid: bool = False) -> Imported:
    return import_manifest(yaml.safe_dump_all(documents), "job.yaml", local_script(None), keep_uid=keep_uid)


def verdict(found: Imported, end: str) -> ImportVerdict:
    matches = [one for one in found.verdicts if one.key.endswith(end)]
    assert len(matches) == 1, (end, [one.key for one in found.verdicts])
    return matches[0]


def test_a_pytorch_job_becomes_a_section_that_loses_nothing() -> None:
    found = imported(pytorch_job())
    assert found.section == {
        "target": "pytorchjob", "job_name": "ft", "namespace": "ml", "queue": "team", "nodes": 3, "restarts": 3,
        "keep_hours": 2.0, "max_hours": 10.0, **FROM_TEMPLATE,
    }  # fmt: skip


def test_the_fields_that_were_wrong_are_said() -> None:
    found = imported(pytorch_job())
    assert "restricted-v2" in verdict(found, "securityContext.runAsUser").why
    assert verdict(found, "terminationGracePeriodSeconds").sets == "grace_seconds: auto"
    assert "no volume of this name" in verdict(found, "volumeMounts.lost").why
    assert [one.verdict for one in found.verdicts if one.key.endswith("envFrom")] == ["honoured", "not supported"]
    assert "not reserved" in found.check["memory_limit"]
    assert "value1234" not in as_yaml(found) + repr(found)
    assert "kubectl -n ml create secret generic training-secrets" in found.steps[0]


def test_a_fixed_uid_is_kept_when_asked() -> None:
    section = imported(pytorch_job(), keep_uid=True).section
    assert (section["run_as_uid"], section["fs_group"]) == (2000, 3000)


def test_a_worker_that_differs_from_the_master_is_said() -> None:
    job = pytorch_job()
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["image"] = "other"
    found = imported(job)
    image = verdict(found, "Worker.template.spec.containers.pytorch.image")
    assert (image.verdict, image.value) == ("changed", "other")
    assert "Master's (reg/i:1) is used" in image.why
    assert found.section["image"] == "reg/i:1"


def test_every_field_in_which_a_worker_differs_has_its_line_with_what_was_written() -> None:
    job = pytorch_job()
    replicas = job["spec"]["pytorchReplicaSpecs"]
    replicas["Master"]["template"]["spec"]["containers"][0]["livenessProbe"] = {"exec": {"command": ["true"]}}
    worker = replicas["Worker"]["template"]
    worker["metadata"] = {"labels": {"team": "vision"}}
    for name in ("nodeSelector", "tolerations", "volumes", "serviceAccountName"):
        del worker["spec"][name]
    container = worker["spec"]["containers"][0]
    container["name"] = "worker"
    container["env"] = [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "API_KEY", "value": "value5678"}]
    container["resources"] = {"limits": {"nvidia.com/gpu": 4, "memory": "96Gi"}}
    del container["volumeMounts"]
    worker["spec"]["containers"] = [container]
    replicas["Master"]["template"]["spec"]["containers"].pop()
    found = imported(job)
    lines = {one.key.removeprefix("Worker.template."): one for one in found.verdicts if one.key.startswith("Worker.t")}
    assert set(lines) == {
        "metadata.labels.team", "metadata.annotations.k8s.v1.cni.cncf.io/networks", "metadata.annotations.note",
        "spec.nodeSelector.zone", "spec.tolerations", "spec.serviceAccountName", "spec.containers.name",
        "spec.containers.livenessProbe", "spec.containers.env.HF_TOKEN", "spec.containers.env.WANDB_API_KEY",
        "spec.containers.env.POD", "spec.containers.env.API_KEY", "spec.containers.resources.requests.cpu",
        "spec.containers.resources.requests.memory", "spec.containers.resources.limits.nvidia.com/gpu",
        "spec.containers.resources.limits.rdma/hca",
        *(f"spec.volumes.{name}" for name in ("shm", "runs", "models", "scripts")),
        *(f"spec.containers.volumeMounts.{path}" for path in ("/dev/shm", "/runs", "/models", "/scripts", "/lost")),
    }  # fmt: skip
    gpus = lines["spec.containers.resources.limits.nvidia.com/gpu"]
    assert (gpus.value, found.section["gpus_per_node"]) == ("4", 8)
    assert "Master's (8) is used" in gpus.why
    assert "gets Master's (persistentVolumeClaim: claimName: runs-claim)" in lines["spec.volumes.runs"].why
    assert "gets Master's (16)" in lines["spec.containers.resources.requests.cpu"].why
    assert "value5678" not in repr(found) and "value1234" not in repr(found)


def test_a_worker_without_resources_is_named_by_its_gpus() -> None:
    job = pytorch_job()
    del job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"]
    gpus = verdict(imported(job), "Worker.template.spec.containers.pytorch.resources.limits.nvidia.com/gpu")
    assert "gets Master's (8)" in gpus.why


def test_limits_without_requests_are_said_to_be_limits() -> None:
    job = plain_job()
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"cpu": "16", "memory": "64Gi"}}
    found = imported(job)
    lines = [
        (one.key.rpartition("resources.")[2], one.verdict, one.sets)
        for one in found.verdicts
        if "resources." in one.key
    ]
    assert lines == [
        ("limits.cpu", "translated", "cpu: 16"),
        ("limits.cpu", "honoured", "cpu_limit: 16"),
        ("limits.memory", "translated", "memory: 64Gi"),
    ]


def test_storage_whose_request_is_less_than_its_limit_is_said() -> None:
    job = plain_job()
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"requests": {"ephemeral-storage": "5Gi"}, "limits": {"ephemeral-storage": "9Gi"}}
    storage = verdict(imported(job), "ephemeral-storage")
    assert (storage.verdict, storage.sets) == ("changed", "ephemeral_storage: 9Gi")
    assert "5Gi" in storage.why


def test_an_elastic_job_and_an_unknown_field_are_answered() -> None:
    job = pytorch_job()
    job["spec"] |= {"elasticPolicy": {"minReplicas": 1}, "wonder": 1}
    job["spec"]["runPolicy"]["schedulingPolicy"] = {"minAvailable": 2}
    found = imported(job)
    assert verdict(found, "elasticPolicy").verdict == "not supported"
    assert verdict(found, "schedulingPolicy").verdict == "not supported"
    assert verdict(found, "spec.wonder").verdict == "not known"


def test_a_pod_for_run_ais_scheduler_goes_to_run_ai() -> None:
    job = pytorch_job()
    job["metadata"]["labels"] = {"project": "nlp"}
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["schedulerName"] = "runai-scheduler"
    found = imported(job)
    assert (found.section["target"], found.section["runai_project"]) == ("runai", "nlp")
    assert "runai_submit: cli refuses it" in found.check["pod_overlay"]


def plain_job() -> dict[str, Any]:
    spec = {
        "completions": 4,
        "parallelism": 4,
        "completionMode": "Indexed",
        "backoffLimit": 1,
        "template": copy.deepcopy(TEMPLATE),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "ft"}, "spec": spec}


def test_an_indexed_job_becomes_a_section() -> None:
    section = imported(plain_job()).section
    assert section == {"target": "job", "job_name": "ft", "nodes": 4, "restarts": 1, **FROM_TEMPLATE}


def job_set() -> dict[str, Any]:
    inner = plain_job()["spec"]
    cpu_only = {"name": "driver", "replicas": 1, "template": {"spec": {"template": {"spec": {"containers": []}}}}}
    spec = {
        "failurePolicy": {"maxRestarts": 5},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [cpu_only, {"name": "node", "replicas": 2, "template": {"spec": inner}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "ft"}, "spec": spec}


def test_a_job_set_becomes_a_section_of_the_job_with_the_gpus() -> None:
    found = imported(job_set())
    assert found.section == {"target": "jobset", "job_name": "ft", "nodes": 8, "restarts": 5, **FROM_TEMPLATE}
    assert verdict(found, "replicatedJobs.driver").verdict == "not supported"


def train_job() -> dict[str, Any]:
    spec = {
        "runtimeRef": {"name": "torch", "kind": "TrainingRuntime"},
        "trainer": {
            "numNodes": 3,
            "numProcPerNode": 8,
            "image": "own/i:2",
            "command": ["torchrun", "train.py"],
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8, "memory": "3846"}},
        },
    }
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "ft"}, "spec": spec}


def runtime() -> dict[str, Any]:
    template = {
        "spec": {"serviceAccountName": "trainer", "containers": [{"name": "node", "image": "base", "workingDir": "/w"}]}
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": {"template": template}}}
    spec = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": [job]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "torch"},
        "spec": spec,
    }


OF_TRAINER = {"target": "trainjob", "job_name": "ft", "nodes": 3, "image": "own/i:2", "env": {"NCCL_DEBUG": "INFO"},
              "gpus_per_node": 8, "memory": "3846Mi"}  # fmt: skip


def test_a_train_job_without_its_runtime_says_what_is_missing() -> None:
    found = imported(train_job())
    assert found.section == OF_TRAINER
    assert "kubectl get trainingruntime torch -o yaml" in verdict(found, "runtimeRef").why
    assert found.check["memory"].endswith("3846Mi is a guess.")


def test_a_train_job_is_read_together_with_its_runtime() -> None:
    found = imported(train_job(), runtime())
    assert found.section == {**OF_TRAINER, "service_account": "trainer", "working_dir": "/w"}
    assert not [one for one in found.verdicts if one.verdict in ("not known", "not supported")]


@pytest.mark.parametrize(
    "patch",
    [
        {"podSpecOverrides": [{"targetJobs": [{"name": "node"}], "nodeSelector": {"zone": "b"}}]},
        {"podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": {"nodeSelector": {"zone": "b"}}}]},
        {"runtimePatches": [{"manager": "a.b/c", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
            {"name": "node", "template": {"spec": {"template": {"spec": {"nodeSelector": {"zone": "b"}}}}}}]}}}}]},
    ],
)  # fmt: skip
def test_changes_of_the_runtime_are_merged_whatever_their_field_is_called(patch: dict[str, Any]) -> None:
    job = train_job()
    job["spec"] |= patch
    assert imported(job, runtime()).section["node_selector"] == {"zone": "b"}
    assert verdict(imported(job), next(iter(patch))).verdict == "not supported"


def test_other_objects_of_the_file_are_answered() -> None:
    found = imported(
        {"kind": "Secret", "metadata": {"name": "hub"}}, plain_job(), {"kind": "Service", "metadata": {"name": "s"}}
    )
    assert {one.key for one in found.verdicts if one.verdict == "no effect"} >= {"Secret", "Service"}


@pytest.mark.parametrize("text", ["", "a: b", "- 1", "kind: Deployment", "{unclosed"])
def test_a_file_without_a_job_is_refused(text: str) -> None:
    with pytest.raises(UserInputError):
        import_manifest(text, "x.yaml", local_script(None))


def test_two_jobs_in_a_file_are_refused() -> None:
    with pytest.raises(UserInputError, match="2 jobs"):
        imported(plain_job(), pytorch_job())


def test_a_job_that_was_rendered_is_imported_and_renders_the_same_pods(tmp_path: Path) -> None:
    settings = {"image": "i@sha256:1", "nodes": 2, "gpus_per_node": 8, "memory": "64Gi", "shared_memory": "8Gi", "cpu": "4",
                "volumes": [{"claim": "runs", "path": "/runs", "read_only": True}], "env": {"A": "b"}, "restarts": 0,
                "secret_env": {"HF_TOKEN": "hub/token"}, "networks": ["ml/ib0"], "labels": {"a": "b"}, "grace_seconds": 300,
                "pod_overlay": {"spec": {"hostIPC": True}}, "run_as_uid": 4, "fs_group": 5}  # fmt: skip
    before = render_job(job_with(tmp_path, **settings))
    found = imported(before.workload, keep_uid=True)
    file = tmp_path / "again.yaml"
    file.write_text(f"{yaml.safe_dump(RUN)}{as_yaml(found)}", encoding="utf-8")
    after = render_job(make_job(load_config(file), file))
    assert after.templates["node"] == before.templates["node"]


def test_a_file_is_imported_by_the_command_line(shardtune: Command, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(pytorch_job()), encoding="utf-8")
    done = shardtune("cluster", "import", str(file))
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["cluster"]["nodes"] == 3
    assert "restricted-v2" in done.stderr
