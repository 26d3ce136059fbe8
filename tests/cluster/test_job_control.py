"""Lists, status, cancel, suspend and resume, in the right order and in the wrong one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
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


@pytest.fixture
def elsewhere(server: ApiServer, tmp_path: Path, kube: Kube) -> Kube:
    """The command line of somebody whose context has another namespace than the jobs, and who names both."""
    file = server.kubeconfig(tmp_path, namespace="default")
    content = json.loads(file.read_text(encoding="utf-8"))
    content["contexts"].append({**content["contexts"][0], "name": "lab-2"})
    file.write_text(json.dumps(content), encoding="utf-8")
    return lambda *words: kube(*words, "-n", "ml", "--context", "lab-2")


def test_commands_that_are_named_reach_the_job_as_they_are_printed(server: ApiServer, elsewhere: Kube) -> None:
    server.put("jobs", workload("Job", ("Failed", "x"), nodes=1))
    server.put("jobs", workload(name="held", suspend=True))
    server.put("pods", pod(0, "Failed", exit_code=75))
    where = "-n ml --context lab-2"
    assert f"shardtune describe ft {where} says why" in elsewhere("status", "ft").stdout
    described = elsewhere("describe", "ft").stdout
    assert f"shardtune logs ft {where}." in described
    assert f"shardtune cancel ft {where})" in described
    assert f"shardtune resume held {where}" in elsewhere("status", "held").stdout
    assert f"shardtune resume held {where}." in elsewhere("describe", "held").stdout
    assert f"shardtune jobs {where} (" in elsewhere("status", "none").stderr


def test_the_contexts_own_namespace_is_not_repeated(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload())
    for words in ((), ("-n", "ml"), ("--context", "lab")):
        assert "shardtune describe ft says why" in kube("status", "ft", *words).stdout


def test_a_list_of_jobs_has_one_line_each_and_no_messages_on_a_narrow_terminal(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload(failed=2))
    for rank in (0, 1):
        server.put("pods", pod(rank, "Failed", exit_code=71))
    plain = kube("jobs", env={"COLUMNS": "60"}).stdout.splitlines()
    assert len(plain) == 2
    assert plain[1].endswith("ended with exit code 71: A GPU ran out of memory")
    coloured = kube("jobs", env={"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
    narrow = re.sub(r"\x1b\[\d*m", "", coloured).splitlines()
    assert len(narrow) == 3
    assert "MESSAGE" not in narrow[0] and max(map(len, narrow)) <= 80
    assert "shardtune status ft says more" in narrow[2]
