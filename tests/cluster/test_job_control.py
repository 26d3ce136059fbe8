"""Lists, status, cancel, suspend and resume, in the right order and in the wrong one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from api_server import ApiServer
from cluster_objects import PLURALS, pod, workload

Kube = Callable[..., Any]


def owned(name: str, uid: str | None) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "shardtune", "app.kubernetes.io/instance": "ft"}
    owners = [{"uid": uid, "kind": "Job", "name": "ft"}] if uid else []
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels, "ownerReferences": owners},
    }


def test_jobs_of_every_kind_are_listed_and_a_trainjobs_own_jobset_is_not(server: ApiServer, kube: Kube) -> None:
    for kind, plural in PLURALS.items():
        server.put(plural, workload(kind, name=f"a-{kind.lower()}"))
    inner = workload("JobSet", name="a-trainjob")
    inner["metadata"]["ownerReferences"] = [{"uid": "uid-of-a-trainjob", "controller": True, "kind": "TrainJob"}]
    server.put("jobsets", inner)
    found = json.loads(kube("jobs", "--json").stdout)
    assert sorted((one["name"], one["kind"]) for one in found) == [
        ("a-job", "Job"), ("a-jobset", "JobSet"), ("a-pytorchjob", "PyTorchJob"), ("a-trainjob", "TrainJob"),
    ]  # fmt: skip


def test_kinds_that_are_not_installed_are_no_error(server: ApiServer, kube: Kube) -> None:
    server.crds.clear()
    server.put("jobs", workload())
    server.put("pods", pod(0))
    done = kube("jobs")
    assert done.returncode == 0
    assert "1/2" in done.stdout
    assert done.stderr == ""


def test_kinds_that_may_not_be_listed_are_said(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    server.forbidden.add(("list", "pytorchjobs"))
    done = kube("jobs")
    assert "ft" in done.stdout
    assert "no permission to list pytorchjobs" in done.stderr


def test_other_peoples_jobs_are_neither_listed_nor_touched(server: ApiServer, kube: Kube) -> None:
    theirs = workload(name="theirs")
    theirs["metadata"]["labels"] = {}
    server.put("jobs", theirs)
    assert "No jobs of shardtune in namespace 'ml'" in kube("jobs").stdout
    done = kube("cancel", "theirs", "--yes")
    assert done.returncode == 2
    assert "was not made by shardtune" in done.stderr
    assert server.names("jobs") == ["jobs/theirs"]


def test_a_namespace_that_does_not_exist_is_said(kube: Kube) -> None:
    done = kube("jobs", "-n", "nowhere")
    assert done.returncode == 2
    assert "The namespace 'nowhere' does not exist" in done.stderr


def test_a_job_in_another_namespace_is_pointed_to(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    done = kube("status", "ft", "-n", "default")
    assert done.returncode == 2
    assert "but in ml" in done.stderr
    assert "-n ml" in done.stderr


def test_status_says_the_failure_and_exits_with_1(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload("Job", ("Failed", "Job has reached the specified backoff limit")))
    server.put("pods", pod(1, "Failed", exit_code=2))
    done = kube("status", "ft")
    assert done.returncode == 1
    assert "failed: Job has reached the specified backoff limit" in done.stdout
    assert "exit code 2: Invalid input" in done.stdout
    assert json.loads(kube("status", "ft", "--json").stdout)["failure"]["exit_code"] == 2


def test_cancel_names_what_it_would_delete_and_asks_first(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    server.put("configmaps", owned("ft-config", "uid-of-ft"))
    done = kube("cancel", "ft")
    assert done.returncode == 2
    assert "Job ft (pending), 0 pods, ConfigMap ft-config in namespace ml" in done.stderr
    assert server.names("jobs", "configmaps") == ["configmaps/ft-config", "jobs/ft"]


def test_cancel_deletes_the_job_what_it_owns_and_what_a_pipeline_made_for_it(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    server.put("configmaps", owned("ft-config", "uid-of-ft"))
    server.put("configmaps", owned("ft-unowned", None))
    server.put("configmaps", owned("ft-of-another", "uid-of-another"))
    done = kube("cancel", "ft", "--yes")
    assert done.returncode == 0, done.stderr
    assert "Its pods are gone" in done.stdout
    assert server.names("jobs", "configmaps") == ["configmaps/ft-of-another"]


def test_cancelling_twice_says_that_there_is_none(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    assert kube("cancel", "ft", "-y", "--no-wait").returncode == 0
    done = kube("cancel", "ft", "-y")
    assert done.returncode == 2
    assert "There is no job 'ft'" in done.stderr


@pytest.mark.parametrize("kind", PLURALS)
def test_every_kind_is_suspended_and_resumed_by_its_own_field(kind: str, server: ApiServer, kube: Kube) -> None:
    server.put(PLURALS[kind], workload(kind))

    def field() -> bool:
        spec = server.of(PLURALS[kind])[0]["spec"]
        return bool(spec["runPolicy"]["suspend"] if kind == "PyTorchJob" else spec["suspend"])

    assert kube("suspend", "ft").returncode == 0
    assert field()
    again = kube("suspend", "ft")
    assert again.returncode == 2
    assert "suspended already" in again.stderr
    assert kube("resume", "ft").returncode == 0
    assert not field()


def test_a_running_job_is_not_resumed_and_an_ended_one_not_suspended(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload(nodes=1))
    server.put("pods", pod(0))
    assert "is not suspended: it is running" in kube("resume", "ft").stderr
    server.put("jobs", workload("Job", ("Complete", "done"), nodes=1))
    assert "has ended (succeeded)" in kube("suspend", "ft").stderr


def test_without_permission_nothing_changes_and_the_verb_is_named(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    server.forbidden |= {("patch", "jobs"), ("delete", "jobs")}
    assert "no permission to patch jobs" in kube("suspend", "ft").stderr
    assert "no permission to delete jobs" in kube("cancel", "ft", "-y").stderr
    assert server.names("jobs") == ["jobs/ft"]
