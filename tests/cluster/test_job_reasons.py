"""Why a job is pending or has failed, in words, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_server import ApiServer
from cluster_objects import event, pod, workload

Kube = Callable[..., Any]

NO_ROOM = (
    "0/12 nodes are available: 3 node(s) had untolerated taint {nvidia.com/gpu: present}, 9 Insufficient "
    "nvidia.com/gpu. preemption: 0/12 nodes are available: 12 Preemption is not helpful for scheduling."
)


@pytest.mark.parametrize(
    ("options", "said", "fix"),
    [
        ({"unschedulable": NO_ROOM}, "not enough nvidia.com/gpu, a taint that the pods do not tolerate", "tolerations"),
        ({"unschedulable": "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."},
         "cluster.node_selector", "Correct cluster.node_selector"),
        ({"unschedulable": '0/2 nodes are available: persistentvolumeclaim "runs" not found.'},
         "PersistentVolumeClaim 'runs' does not exist", "cluster.volumes"),
        ({"unschedulable": "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."},
         "has no volume yet", "kubectl describe pvc"),
        ({"unschedulable": "3/3 tasks in gang unschedulable: pod group is not ready, 3 Pending, 3 minAvailable"},
         "gang scheduling", "lower cluster.nodes"),
        ({"waiting": ("ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: manifest unknown: not found')},
         "does not exist", "Correct cluster.image"),
        ({"waiting": ("ErrImagePull", "pull access denied, repository does not exist or may require authorization")},
         "does not let node 0", "image_pull_secrets"),
        ({"waiting": ("ErrImagePull", "dial tcp: lookup registry.example: no such host")}, "cannot reach the registry",
         "that the cluster reaches"),
        ({"waiting": ("CreateContainerConfigError", 'secret "hub" not found')}, "The secret 'hub' that node 0",
         "cluster.secret_env"),
        ({"waiting": ("CreateContainerConfigError", "couldn't find key token in Secret ml/hub")},
         "Secret hub has no key token", "cluster.secret_env"),
        ({"init_exit_code": 1}, "init container doctor of node 0", "Read its log"),
    ],
)  # fmt: skip
def test_a_pending_pod_is_explained(
    options: dict[str, Any], said: str, fix: str, server: ApiServer, kube: Kube
) -> None:
    server.put("jobs", workload(nodes=1))
    server.put("pods", pod(0, "Pending", **options))
    server.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, "status": {"phase": "Bound"}})
    done = kube("describe", "ft")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert said in text
    assert fix in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exit_code": 137, "reason": "OOMKilled"}, "used more host memory than its limit (OOMKilled)"),
        ({"evicted": "The node was low on resource: ephemeral-storage."}, "was evicted"),
        ({"exit_code": 71}, "exit code 71: A GPU ran out of memory"),
    ],
)
def test_a_failed_pod_is_explained(options: dict[str, Any], said: str, server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload("Job", ("Failed", "Job has reached the specified backoff limit"), nodes=1))
    server.put("pods", pod(0, "Failed", **options))
    text = " ".join(kube("describe", "ft").stdout.split())
    assert said in text
    assert "shardtune logs ft" in text


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("FailedCreate", 'Error creating: pods "ft-0" is forbidden: exceeded quota: gpus', "quota does not allow"),
        ("FailedCreate", "Error creating: unable to validate against any security context constraint: []", "OpenShift"),
        ("FailedCreate", "Error creating: admission webhook denied", "cannot create the pods"),
        ("TrainJobResourcesCreationFailed", "jobset name too long", "cannot create the pods"),
    ],
)
def test_a_controller_that_cannot_create_pods_is_quoted(
    reason: str, message: str, said: str, server: ApiServer, kube: Kube
) -> None:
    job = server.put("jobs", workload())
    server.put("events", event(job, reason, message))
    text = " ".join(kube("describe", "ft").stdout.split())
    assert said in text
    assert message in text


def test_a_claim_that_is_not_bound_is_named(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload(nodes=1))
    server.put("pods", pod(0, "Pending"))
    server.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, "status": {"phase": "Pending"}})
    assert "The PersistentVolumeClaim 'runs' is not bound (Pending)" in kube("describe", "ft").stdout


def test_a_volume_that_cannot_be_mounted_is_named(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload(nodes=1))
    one = server.put("pods", pod(0, "Pending", waiting=("ContainerCreating", "")))
    message = 'MountVolume.SetUp failed for volume "config" : configmap "ft-config" not found'
    server.put("events", event(one, "FailedMount", message))
    assert "The configmap 'ft-config' that node 0" in kube("describe", "ft").stdout


def test_events_of_other_jobs_with_a_longer_name_are_not_ours(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    other = workload(name="ft-2")
    server.put("events", event(other, "FailedCreate", "exceeded quota: of another job"))
    assert "another job" not in kube("describe", "ft").stdout


def test_the_same_reason_of_three_pods_is_said_once(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload(nodes=3))
    for rank in range(3):
        server.put("pods", pod(rank, "Pending", unschedulable='persistentvolumeclaim "runs" not found'))
    assert kube("describe", "ft").stdout.count("The PersistentVolumeClaim 'runs' does not exist") == 1


def test_who_may_not_read_events_still_gets_what_pods_say(server: ApiServer, kube: Kube) -> None:
    server.forbidden.add(("list", "events"))
    server.put("jobs", workload(nodes=1))
    server.put("pods", pod(0, "Pending", unschedulable=NO_ROOM))
    assert "not enough nvidia.com/gpu" in kube("describe", "ft").stdout


def test_of_two_missing_claims_only_the_one_that_the_scheduler_named_is_quoted(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload(nodes=1))
    words = '0/2 nodes are available: persistentvolumeclaim "data" not found.'
    one = pod(0, "Pending", unschedulable=words)
    one["spec"]["volumes"].append({"name": "pvc-data", "persistentVolumeClaim": {"claimName": "data"}})
    server.put("pods", one)
    text = " ".join(kube("describe", "ft").stdout.split())
    assert "'data' does not exist" in text and "'runs' does not exist" in text
    assert text.count("Kubernetes says:") == 1
    assert f"Kubernetes says: {words}" in text


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (2, "Fix the cause first; restarting alone will not help."),
        (75, "Submitting it again (first: shardtune cancel ft) resumes the run from its checkpoint."),
    ],
)
def test_whether_a_restart_helps_is_a_sentence(code: int, advice: str, server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload("Job", ("Failed", "Job has reached the specified backoff limit"), nodes=1))
    server.put("pods", pod(0, "Failed", exit_code=code))
    assert advice in kube("describe", "ft").stdout


def test_describe_shows_what_a_crashing_container_waits_for(server: ApiServer, kube: Kube) -> None:
    server.put("pytorchjobs", workload("PyTorchJob"))
    crash = ("CrashLoopBackOff", "back-off 40s restarting failed container")
    server.put("pods", pod(0, kind="PyTorchJob", name="ft-master-0", restarts=2, exit_code=2, waiting=crash))
    text = kube("describe", "ft").stdout
    assert "ft-master-0: CrashLoopBackOff (Running, last exit code 2: Invalid input) on" in text
