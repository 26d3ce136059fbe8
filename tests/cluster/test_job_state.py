"""One set of states for every kind."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_objects import VERSIONS, pod, workload

from shardtune.cluster.resources import resource_of
from shardtune.cluster.state import JobStatus, job_status, pod_state
from shardtune.cluster.workloads import Workload, node_rank


def status(manifest: dict[str, Any], *pods: dict[str, Any], kueue: dict[str, Any] | None = None) -> JobStatus:
    return job_status(Workload(resource_of(manifest), manifest), pods, kueue)


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_job_of_every_kind_is_running_when_all_its_pods_are(kind: str) -> None:
    job = workload(kind)
    assert status(job, pod(0, kind=kind), pod(1, kind=kind)).state == "running"
    one = status(job, pod(0, kind=kind), pod(1, "Pending", kind=kind))
    assert (one.state, one.ready, one.nodes, one.message) == ("pending", 1, 2, "1 of 2 nodes are running")
    assert status(job).message == "no pod has been created yet"


@pytest.mark.parametrize(
    ("kind", "condition", "state"),
    [
        ("Job", "Complete", "succeeded"), ("Job", "SuccessCriteriaMet", "succeeded"), ("Job", "Failed", "failed"),
        ("Job", "FailureTarget", "failed"), ("JobSet", "Completed", "succeeded"), ("JobSet", "Failed", "failed"),
        ("TrainJob", "Complete", "succeeded"), ("TrainJob", "Failed", "failed"),
        ("PyTorchJob", "Succeeded", "succeeded"), ("PyTorchJob", "Failed", "failed"),
        ("JobSet", "RestartingJobSet", "restarting"), ("PyTorchJob", "Restarting", "restarting"),
        ("PyTorchJob", "Created", "pending"),
    ],
)  # fmt: skip
def test_conditions_of_each_kind_mean_the_same_state(kind: str, condition: str, state: str) -> None:
    found = status(workload(kind, (condition, "because")))
    assert found.state == state
    assert found.ended == ("2026-09-01T11:00:00Z" if state in ("succeeded", "failed") else None)


def test_a_failed_job_whose_master_still_shows_running_has_failed() -> None:
    job = workload("PyTorchJob", ("Running", "PyTorchJob ft is running."), ("Failed", "PyTorchJob ft is failed."))
    assert status(job, pod(0, kind="PyTorchJob")).state == "failed"


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_suspended_job_of_every_kind_is_suspended(kind: str) -> None:
    assert status(workload(kind, suspend=True)).state == "suspended"


def test_a_job_that_kueue_holds_back_is_queued_with_its_reason() -> None:
    words = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu, 8 more needed"
    kueue = {
        "spec": {"active": True},
        "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": words}]},
    }
    job = workload(suspend=True, queue="gpus")
    assert (status(job, kueue=kueue).state, status(job, kueue=kueue).message) == ("queued", f"gpus: {words}")
    assert status(job, kueue={**kueue, "spec": {"active": False}}).state == "suspended"


def test_restarts_are_counted_by_pods_by_containers_and_by_the_set() -> None:
    again = (pod(0, "Failed", exit_code=1), pod(0, created="2026-09-01T10:40:00Z"), pod(1))
    assert status(workload(), *again).restarts == 1
    assert status(workload(), pod(0, restarts=3), pod(1)).restarts == 3
    assert status(workload("JobSet", restarts=2), pod(0, kind="JobSet")).restarts == 2
    assert status(workload("TrainJob"), pod(0, kind="TrainJob", attempt=4)).restarts == 4


def test_a_job_between_two_attempts_is_restarting() -> None:
    pods = (pod(0, "Failed", exit_code=69), pod(0, "Pending", created="2026-09-01T10:40:00Z"), pod(1))
    found = status(workload(), *pods)
    assert (found.state, found.message) == ("restarting", "1 of 2 nodes are running")


def test_the_failure_that_is_shown_is_the_cause_and_not_the_node_that_lost_it() -> None:
    pods = (
        pod(0, "Failed", exit_code=69, finished="2026-09-01T10:29:59Z"),
        pod(1, "Failed", exit_code=71, name="ft-1-cause", finished="2026-09-01T10:30:00Z"),
    )
    failure = status(workload("Job", ("Failed", "BackoffLimitExceeded")), *pods).failure
    assert failure is not None
    assert str(failure) == (
        "node 1 (pod ft-1-cause, container trainer) ended with exit code 71: A GPU ran out of memory"
    )


def test_an_evicted_pod_is_a_failure_without_an_exit_code() -> None:
    found = status(workload("Job", ("Failed", "x")), pod(0, "Failed", evicted="The node was low on resource: memory."))
    assert found.failure is not None
    assert (found.failure.exit_code, found.failure.reason) == (None, "Evicted")


def test_the_master_of_a_pytorchjob_is_node_0_and_its_first_worker_node_1() -> None:
    assert [node_rank(pod(rank, kind="PyTorchJob")) for rank in (0, 1, 2)] == [0, 1, 2]


def test_a_master_that_has_succeeded_counts_while_workers_still_run() -> None:
    assert status(workload(), pod(0, "Succeeded"), pod(1)).state == "running"


def test_a_job_whose_pods_failed_and_that_waits_to_retry_is_restarting_with_the_failure() -> None:
    pods = (pod(0, "Failed", exit_code=2, name="ft-0-a"), pod(1, "Failed", exit_code=69))
    found = status(workload(failed=3), *pods)
    assert (found.state, found.restarts) == ("restarting", 2)
    assert str(found.failure) == "node 0 (pod ft-0-a, container trainer) ended with exit code 2: Invalid input"


def test_the_last_attempt_of_a_failed_job_is_no_restart() -> None:
    pods = (pod(0, "Failed", exit_code=2), pod(1, "Failed", exit_code=2))
    assert status(workload("Job", ("Failed", "x"), failed=2), *pods).restarts == 0
    assert status(workload("Job", ("Failed", "x"), failed=4), *pods).restarts == 1


def test_a_container_that_waits_after_a_crash_is_not_called_running() -> None:
    crashing = pod(0, kind="PyTorchJob", restarts=3, exit_code=71, waiting=("CrashLoopBackOff", "back-off 40s"))
    assert pod_state(crashing) == "CrashLoopBackOff (Running, last exit code 71: A GPU ran out of memory)"
    assert pod_state(pod(0, restarts=1, exit_code=71)) == "Running"
    assert pod_state(pod(0, "Pending", waiting=("ContainerCreating", ""))) == "ContainerCreating (Pending)"
