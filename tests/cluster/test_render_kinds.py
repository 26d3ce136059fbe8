"""Every kind is rendered as its controller wants it, and what it cannot express is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from renew_golden import golden_texts
from sample_jobs import CRDS, GOLDEN, KINDS, rich_job, small_job

from shardtune.cluster.crd_schemas import read_crds
from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.render import render
from shardtune.cluster.render_trainjob import release_of_crd
from shardtune.errors import UserInputError

LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield path, value
    for key, inner in items:
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def all_leaves(manifests: Manifests) -> dict[str, Any]:
    return {f"{one['kind']}:{path}": value for one in manifests for path, value in leaves(one)}


def runtime_of(manifests: Manifests) -> Manifest:
    (runtime,) = [one for one in manifests.support if one["kind"] == "TrainingRuntime"]
    return runtime


def job_in(manifests: Manifests) -> Manifest:
    """The Job template inside a JobSet or a runtime."""
    spec = manifests.workload["spec"] if manifests.workload["kind"] == "JobSet" else None
    (job,) = (spec or runtime_of(manifests)["spec"]["template"]["spec"])["replicatedJobs"]
    return job["template"]


@pytest.mark.parametrize("name", sorted(golden_texts()))
def test_what_is_rendered_is_what_the_golden_file_says(name: str) -> None:
    assert golden_texts()[name] == (GOLDEN / name).read_text(encoding="utf-8"), "python tests/cluster/renew_golden.py"


def test_every_golden_file_belongs_to_a_job() -> None:
    assert {file.name for file in GOLDEN.iterdir()} == set(golden_texts())


_RUNTIME = "TrainingRuntime:spec.template.spec.replicatedJobs.0.template.spec"
SCALED = {
    "trainjob": {
        "TrainJob:spec.trainer.numNodes",
        "TrainingRuntime:spec.mlPolicy.numNodes",
        f"{_RUNTIME}.completions",
        f"{_RUNTIME}.parallelism",
        f"{_RUNTIME}.template.spec.containers.0.env.0.value",
    },
    "pytorchjob": {
        "PyTorchJob:spec.runPolicy.backoffLimit",
        "PyTorchJob:spec.pytorchReplicaSpecs.Worker.replicas",
        "PyTorchJob:spec.pytorchReplicaSpecs.Master.template.spec.containers.0.env.0.value",
        "PyTorchJob:spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.env.0.value",
    },
    "jobset": {
        "JobSet:spec.replicatedJobs.0.template.spec.completions",
        "JobSet:spec.replicatedJobs.0.template.spec.parallelism",
        "JobSet:spec.replicatedJobs.0.template.spec.template.spec.containers.0.env.2.value",
    },
    "job": {
        "Job:spec.completions",
        "Job:spec.parallelism",
        "Job:spec.backoffLimit",
        "Job:spec.template.spec.containers.0.env.2.value",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_changes_the_number_of_nodes_and_nothing_else(kind: str) -> None:
    three, eight = all_leaves(render(small_job(3), kind)), all_leaves(render(small_job(8), kind))
    assert three.keys() == eight.keys()
    assert {path for path in three if three[path] != eight[path]} == SCALED[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_queue_of_kueue_is_a_label_of_the_workload_alone(kind: str) -> None:
    manifests = render(rich_job(3), kind)
    holders = [path for path in all_leaves(manifests) if "kueue.x-k8s.io/queue-name" in path]
    assert holders == [f"{manifests.workload['kind']}:metadata.labels.kueue.x-k8s.io/queue-name"]


@pytest.mark.parametrize("kind", KINDS)
def test_templates_are_the_very_dicts_inside_the_objects_and_no_two_share_a_part(kind: str) -> None:
    manifests = render(rich_job(3), kind)
    for template in manifests.templates.values():
        template["spec"]["containers"][0]["image"] = f"changed-{id(template)}"
    images = [value for path, value in all_leaves(manifests).items() if path.endswith(".containers.0.image")]
    assert sorted(images) == sorted(f"changed-{id(template)}" for template in manifests.templates.values())


@pytest.mark.parametrize(
    ("kind", "container"), [("trainjob", "node"), ("pytorchjob", "pytorch"), ("jobset", "trainer")]
)
def test_an_overlay_names_the_container_trainer_whatever_the_kind_calls_it(kind: str, container: str) -> None:
    overlay = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": None,
            "containers": [{"name": "trainer", "stdin": True}, {"name": "sidecar", "image": "s"}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }
    for template in render(small_job(2, pod_overlay=overlay), kind).templates.values():
        spec = template["spec"]
        assert [one["name"] for one in spec["containers"]] == [container, "sidecar"]
        assert spec["containers"][0]["stdin"] and spec["containers"][0]["image"] == "registry.example/shardtune:1"
        assert [one["name"] for one in spec["volumes"]] == ["shm", "config", "scratch"]
        assert spec["hostNetwork"] and "terminationGracePeriodSeconds" not in spec
        assert template["metadata"]["annotations"] == {"a": "b"}


# --- failures and restarts


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_a_jobset_restarts_as_a_whole_but_not_after_invalid_input(kind: str) -> None:
    manifests = render(small_job(3, restarts=5), kind)
    spec = manifests.workload["spec"] if kind == "jobset" else runtime_of(manifests)["spec"]["template"]["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert spec["failurePolicy"]["maxRestarts"] == 5
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = job_in(manifests)["spec"]
    final, preempted, disrupted = job["podFailurePolicy"]["rules"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    assert final["action"] == "FailJob" and final["onExitCodes"]["values"] == [2, 71]
    assert preempted["action"] == disrupted["action"] == "Ignore" and preempted["onExitCodes"]["values"] == [75]
    assert final["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]


def test_a_pytorchjob_restarts_containers_in_place_because_exit_code_75_asks_for_it() -> None:
    spec = render(small_job(3, restarts=2), "pytorchjob").workload["spec"]
    assert {one["restartPolicy"] for one in spec["pytorchReplicaSpecs"].values()} == {"OnFailure"}
    # It fails at this sum of all containers' restarts: two attempts of three nodes are allowed, a third is not.
    assert spec["runPolicy"]["backoffLimit"] == 7


def test_a_pytorchjob_without_restarts_never_restarts() -> None:
    spec = render(small_job(3, restarts=0), "pytorchjob").workload["spec"]
    assert {one["restartPolicy"] for one in spec["pytorchReplicaSpecs"].values()} == {"Never"}
    assert "backoffLimit" not in spec["runPolicy"]


def test_a_pytorchjob_of_one_node_is_a_master_alone() -> None:
    spec = render(small_job(1), "pytorchjob").workload["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Master"]
    assert spec["nprocPerNode"] == "8"


# --- time limits


def test_max_hours_ends_every_kind_that_has_a_deadline() -> None:
    hours = {"max_hours": 1.5}
    assert render(small_job(2, **hours), "job").workload["spec"]["activeDeadlineSeconds"] == 5400
    assert render(small_job(2, **hours), "pytorchjob").workload["spec"]["runPolicy"]["activeDeadlineSeconds"] == 5400
    for release in ("2.2", "2.3", "auto"):
        manifests = render(small_job(2, trainer_release=release, **hours), "trainjob")
        assert manifests.workload["spec"]["activeDeadlineSeconds"] == 5400
        assert "activeDeadlineSeconds" not in job_in(manifests)["spec"]


@pytest.mark.parametrize(("kind", "release"), [("jobset", "auto"), ("trainjob", "2.0"), ("trainjob", "2.1")])
def test_a_deadline_that_would_begin_anew_with_each_restart_is_refused(kind: str, release: str) -> None:
    with pytest.raises(UserInputError, match=r"cluster\.max_hours \(2\) cannot be kept .* cluster\.restarts \(3\)"):
        render(small_job(2, max_hours=2, trainer_release=release), kind)
    job = job_in(render(small_job(2, max_hours=2, restarts=0, trainer_release=release), kind))
    assert job["spec"]["activeDeadlineSeconds"] == 7200


def test_keep_hours_deletes_the_job_where_that_is_safe() -> None:
    assert render(small_job(keep_hours=1), "job").workload["spec"]["ttlSecondsAfterFinished"] == 3600
    assert render(small_job(keep_hours=0), "jobset").workload["spec"]["ttlSecondsAfterFinished"] == 0
    assert (
        render(small_job(keep_hours=1), "pytorchjob").workload["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 3600
    )
    with pytest.raises(UserInputError, match="cannot delete itself"):
        render(small_job(keep_hours=1), "trainjob")


# --- gang scheduling


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize("gang", ["coscheduling", "volcano"])
def test_gang_scheduling_is_refused_where_nobody_would_make_the_group(kind: str, gang: str) -> None:
    with pytest.raises(UserInputError, match=rf"cannot ask for gang scheduling \({gang}\)"):
        render(small_job(2, gang_scheduling=gang), kind)


def test_a_trainjob_sends_its_gang_to_the_scheduler_that_knows_gangs() -> None:
    volcano = render(small_job(2, gang_scheduling="volcano"), "trainjob")
    assert runtime_of(volcano)["spec"]["podGroupPolicy"] == {"volcano": {}}
    assert volcano.templates["node"]["spec"]["schedulerName"] == "volcano"
    named = render(small_job(2, gang_scheduling="coscheduling", scheduler_name="s"), "trainjob")
    assert runtime_of(named)["spec"]["podGroupPolicy"] == {"coscheduling": {}}
    with pytest.raises(UserInputError, match=r"needs cluster\.scheduler_name"):
        render(small_job(2, gang_scheduling="coscheduling"), "trainjob")
    with pytest.raises(UserInputError, match=r"Trainer 2\.0 cannot ask Volcano"):
        render(small_job(2, gang_scheduling="volcano", trainer_release="2.0"), "trainjob")


def test_a_pytorchjob_asks_for_all_pods_or_none() -> None:
    policy = render(small_job(3, gang_scheduling="volcano", priority_class="high"), "pytorchjob").workload["spec"]
    assert policy["runPolicy"]["schedulingPolicy"] == {"minAvailable": 3, "priorityClass": "high"}


def test_a_topology_without_a_queue_would_do_nothing_and_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"cluster\.topology \(rack\) needs cluster\.queue"):
        render(small_job(2, topology="rack"), "jobset")


# --- TrainJob


@pytest.mark.parametrize("release", ["2.0", "2.1", "2.2", "2.3"])
def test_a_trainjob_of_every_release_says_its_numbers_and_leaves_the_pod_to_the_runtime(release: str) -> None:
    manifests = render(rich_job(3, trainer_release=release), "trainjob")
    assert manifests.workload["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 8}
    assert set(manifests.workload["spec"]) == {"runtimeRef", "trainer"}
    runtime = runtime_of(manifests)
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3, "torch": {}}
    assert job_in(manifests)["metadata"]["labels"][LABEL] == "trainer"
    assert manifests.workload["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    # A failed JobSet that deletes itself is made again by Trainer, for ever.
    assert "ttlSecondsAfterFinished" not in runtime["spec"]["template"]["spec"]


@pytest.mark.parametrize("release", ["2.0", "2.1", "2.2", "2.3"])
def test_the_doctor_of_a_trainjob_knows_all_nodes(release: str) -> None:
    manifests = render(small_job(3, init_doctor=True, trainer_release=release), "trainjob")
    (doctor,) = manifests.templates["node"]["spec"]["initContainers"]
    given = [entry["name"] for entry in doctor["env"] if entry["name"].startswith("PET_")]
    torch = runtime_of(manifests)["spec"]["mlPolicy"]["torch"]
    if release == "2.3":
        assert torch == {"envInjection": {"targets": [{"jobName": "node", "containerNames": ["doctor"]}]}}
        assert given == []
    else:
        assert torch == {}
        assert sorted(given) == [
            "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
        ]  # fmt: skip
    trained = [entry["name"] for entry in manifests.templates["node"]["spec"]["containers"][0]["env"]]
    assert not [name for name in trained if name.startswith("PET_")]  # Trainer's own


def test_the_doctor_needs_no_rank_so_that_every_node_of_a_pytorchjob_has_one() -> None:
    for template in render(small_job(2, init_doctor=True), "pytorchjob").templates.values():
        (doctor,) = template["spec"]["initContainers"]
        assert doctor["command"] == ["shardtune", "doctor", "--this-node", "/etc/shardtune/run.yaml"]


def crd_with(**fields: Any) -> Manifest:
    schema = {"properties": {"spec": {"properties": fields}}}
    versions = [{"name": "v1alpha1", "schema": {"openAPIV3Schema": schema}}]
    return {"metadata": {"name": "trainjobs.trainer.kubeflow.org"}, "spec": {"versions": versions}}


def test_the_release_of_trainer_is_read_from_the_fields_of_its_crd() -> None:
    grace = {"items": {"properties": {"spec": {"properties": {"terminationGracePeriodSeconds": {}}}}}}
    assert release_of_crd(crd_with(podSpecOverrides={})) == "2.0"
    assert release_of_crd(crd_with(podTemplateOverrides={})) == "2.1"
    assert release_of_crd(crd_with(runtimePatches={"items": {}})) == "2.2"
    assert release_of_crd(crd_with(runtimePatches=grace)) == "2.3"
    with pytest.raises(UserInputError, match="release of Kubeflow Trainer cannot be read"):
        release_of_crd(crd_with(trainer={}))


@pytest.mark.parametrize("release", ["2.1", "2.3"])
def test_the_release_of_trainer_is_read_from_its_real_crd(release: str) -> None:
    file = CRDS / f"trainjobs-v{release}.0.yaml"
    if not file.exists():
        pytest.skip(f"there is no {file}")
    (crd,) = read_crds(file)
    assert release_of_crd(crd) == release


def test_a_target_that_is_no_kind_is_refused_with_the_kinds() -> None:
    with pytest.raises(UserInputError) as caught:
        render(small_job(), "slurm")
    assert "trainjob, pytorchjob, jobset, job" in caught.value.fix
