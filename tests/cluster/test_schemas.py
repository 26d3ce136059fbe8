"""Objects are checked without a cluster: every kind by a schema, unknown fields refused, in words."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_jobs import CRDS, KINDS, rich_job, small_job

from shardtune.cluster.crd_schemas import read_crds
from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.render import render
from shardtune.cluster.schemas import validate
from shardtune.errors import UserInputError

CRD_FILES = {
    "jobset": ["jobsets-v0.12.0"],
    "pytorchjob": ["pytorchjobs-v1.9.0"],
    "trainjob": ["trainjobs-v2.3.0", "trainingruntimes-v2.3.0"],
    "trainjob-2.1": ["trainjobs-v2.1.0"],
}


@functools.cache
def real_crds(kind: str) -> tuple[Manifest, ...]:
    files = [CRDS / f"{name}.yaml" for name in CRD_FILES[kind]]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        pytest.skip(f"there is no {missing[0]}")
    return tuple(crd for file in files for crd in read_crds(file))


def problems(manifests: Manifests | list[Manifest], crds: Any = ()) -> list[str]:
    return [str(problem) for problem in validate(manifests, crds).problems]


# --- what we render


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_what_is_rendered_has_no_unknown_field(kind: str, nodes: int) -> None:
    for job in (small_job(nodes), rich_job(nodes)):
        assert problems(render(job, kind)) == []


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_what_is_rendered_is_what_the_real_crd_describes(kind: str, nodes: int) -> None:
    settings: dict[str, Any] = {"init_doctor": True}
    if kind != "jobset":
        settings |= {"gang_scheduling": "volcano", "max_hours": 2}
    report = validate(render(rich_job(nodes, **settings), kind), real_crds(kind))
    assert report.problems == () and not report.unchecked
    assert sum("CRD" in by for by in report.checked.values()) == len(CRD_FILES[kind])


def test_a_trainjob_of_2_1_is_what_the_real_crd_describes() -> None:
    manifests = render(rich_job(3, trainer_release="2.1"), "trainjob")
    assert problems(manifests, real_crds("trainjob-2.1")) == []
    # The field of 2.2 and later is what 2.1 would drop.
    manifests.workload["spec"] |= {"activeDeadlineSeconds": 3600, "runtimePatches": []}
    assert problems(manifests, real_crds("trainjob-2.1")) == [
        "TrainJob rich: spec.activeDeadlineSeconds: unknown field",
        "TrainJob rich: spec.runtimePatches: unknown field",
    ]


# --- what is found


@pytest.mark.parametrize("with_crds", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_field_in_the_pod_is_found_in_every_kind_once(kind: str, with_crds: bool) -> None:
    manifests = render(small_job(1), kind)
    (template,) = manifests.templates.values()
    template["spec"]["containers"][0] |= {"comand": ["x"], "imagePullPolicy": "Sometimes"}
    template["spec"]["containers"][0]["resources"]["limits"]["memory"] = "96GB"
    template["spec"]["hostNetwork"] = "yes"
    found = problems(manifests, real_crds(kind) if with_crds and kind in CRD_FILES else ())
    assert [line.partition("template.spec.")[2].rpartition("template.spec.")[2] or line for line in found] == [
        "containers[0].comand: unknown field; did you mean `command`?",
        "containers[0].imagePullPolicy: must be one of Always, IfNotPresent, Never, is the text 'Sometimes'",
        "containers[0].resources.limits.memory: the text '96GB' is not a quantity of Kubernetes, such as 96Gi or 500m",
        "hostNetwork: must be true or false, is the text 'yes'",
    ]


def test_a_problem_names_the_object_and_the_whole_path_of_the_field() -> None:
    manifests = render(small_job(1), "job")
    manifests.templates["node"]["spec"]["containers"][0]["foo"] = 1
    manifests.workload["metadata"]["labels"]["example.org/a"] = 3
    assert problems(manifests) == [
        "Job ft: metadata.labels['example.org/a']: must be text, is 3",
        "Job ft: spec.template.spec.containers[0].foo: unknown field",
    ]


@pytest.mark.parametrize("with_crds", [False, True])
def test_fields_that_trainers_models_would_drop_are_refused(with_crds: bool) -> None:
    manifests = render(small_job(2), "trainjob")
    manifests.workload["spec"] |= {"podTemplateOverrides": []}
    manifests.workload["spec"]["trainer"] |= {"numNodes": "2", "numProcs": 1}
    manifests.support[-1]["spec"]["mlPolicy"]["torch"]["numProcPerNode"] = "auto"
    manifests.support[-1]["spec"]["template"]["spec"]["ttl"] = 3
    assert problems(manifests, real_crds("trainjob") if with_crds else ()) == [
        "TrainingRuntime ft: spec.mlPolicy.torch.numProcPerNode: unknown field",
        "TrainingRuntime ft: spec.template.spec.ttl: unknown field",
        "TrainJob ft: spec.podTemplateOverrides: unknown field",
        "TrainJob ft: spec.trainer.numNodes: must be an integer, is the text '2'",
        "TrainJob ft: spec.trainer.numProcs: unknown field",
    ]


def test_what_trainers_models_check_in_code_is_reported_too() -> None:
    manifests = render(small_job(1), "trainjob")
    (replicated,) = manifests.support[-1]["spec"]["template"]["spec"]["replicatedJobs"]
    replicated["template"]["spec"]["completionMode"] = "Sorted"
    (found,) = problems(manifests)
    assert "completionMode" in found and "Indexed" in found


def test_a_kind_without_a_schema_is_reported_as_not_checked_but_its_pod_is_checked() -> None:
    manifests = render(small_job(1), "pytorchjob")
    manifests.workload["spec"]["nonsense"] = 1
    manifests.templates["master"]["spec"]["volumes"][0]["emptyDirr"] = {}
    report = validate(manifests)
    assert list(report.unchecked) == ["PyTorchJob ft"] and "--crd-dir" in report.unchecked["PyTorchJob ft"]
    (problem,) = report.problems
    assert problem.path == "spec.pytorchReplicaSpecs.Master.template.spec.volumes[0].emptyDirr"


@pytest.mark.parametrize(
    "spec", ["text", None, [], {"replicatedJobs": "x"}, {"replicatedJobs": ["x", {"template": 3}]}]
)
def test_objects_of_any_shape_are_answered_with_problems(spec: Any) -> None:
    crds = [crd({"type": "object", "required": ["replicatedJobs"], "properties": {"replicatedJobs": JOBS}})]
    broken = {"apiVersion": "example.org/v1", "kind": "JobSet", "metadata": {"name": "a"}, "spec": spec}
    assert problems([broken], crds)
    assert problems([{"kind": "JobSet", "metadata": 3}]) == ["JobSet without a name: apiVersion: is missing"]


# --- CRDs of a site

JOBS = {"type": "array", "items": {"type": "object", "properties": {"template": {"type": "object"}}}}


def crd(spec: Manifest, kind: str = "JobSet") -> Manifest:
    schema = {"type": "object", "properties": {"spec": spec}}
    version = {"name": "v1", "served": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.lower()}s.example.org"},
        "spec": {"group": "example.org", "names": {"kind": kind}, "versions": [version]},
    }


def found_in(spec: Any, **properties: Manifest) -> list[str]:
    thing = {"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": spec}
    found = problems([thing], [crd({"type": "object", "properties": properties}, "Thing")])
    return [line.removeprefix("Thing a: spec.") for line in found]


def test_words_of_kubernetes_in_a_crd_are_understood() -> None:
    either = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert found_in({"a": 1, "b": "50%"}, a=either, b=either) == []
    assert found_in({"a": 1.5}, a=either) == ["a: must be an integer or text, is 1.5"]
    kept = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"b": {"type": "integer"}}}
    assert found_in({"a": {"x": 1, "b": "2"}}, a=kept) == ["a.b: must be an integer, is the text '2'"]
    words = {"type": "object", "additionalProperties": {"type": "string"}}
    assert found_in({"a": {"x": "1", "y": 2}}, a=words) == ["a.y: must be text, is 2"]
    assert found_in({"a": None}, a={"type": "string", "nullable": True, "enum": ["x"]}) == []
    assert found_in({"a": None}, a={"type": "string"}) == ["a: must be text, is null"]
    embedded = {"type": "object", "x-kubernetes-embedded-resource": True, "properties": {"spec": {"type": "object"}}}
    assert found_in({"a": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}}, a=embedded) == []
    assert found_in({"a": {"status": 1}}, a=embedded) == ["a.status: unknown field"]
    assert found_in({"a": {"x": 1}}, a={"type": "object"}) == ["a.x: unknown field"]  # an API server drops it
    limits = {"type": "integer", "minimum": 1, "exclusiveMinimum": True}  # OpenAPI's form
    assert found_in({"a": 1}, a=limits) != [] and found_in({"a": 2}, a=limits) == []
    assert found_in({"a": "x"}, a={"type": "string", "pattern": r"^\p{L}$"}) == []  # Go's, left to the server


def test_alternatives_in_a_crd_do_not_forbid_each_others_fields() -> None:
    either = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "oneOf": [{"required": ["x"]}, {"required": ["y"]}],
    }
    assert found_in({"a": {"x": 1}}, a=either) == []
    assert found_in({"a": {}}, a=either) != []


def test_the_crd_of_the_site_comes_before_the_published_models() -> None:
    own = crd({"type": "object", "x-kubernetes-preserve-unknown-fields": True}, "TrainJob")
    own["spec"] |= {"group": "trainer.kubeflow.org"}
    own["spec"]["versions"][0]["name"] = "v1alpha1"
    manifests = render(small_job(1), "trainjob")
    manifests.workload["spec"]["ours"] = 1
    assert problems(manifests, [own]) == []
    assert problems(manifests) == ["TrainJob ft: spec.ours: unknown field"]


def test_a_version_that_the_site_does_not_serve_is_found() -> None:
    thing = {"apiVersion": "example.org/v2", "kind": "Thing", "metadata": {"name": "a"}}
    assert problems([thing], [crd({"type": "object"}, "Thing")]) == [
        "Thing a: apiVersion: the site's CRD serves v1, not v2"
    ]


def test_crds_are_read_from_single_files_and_from_what_kubectl_writes(tmp_path: Path) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [crd({"type": "object"}, kind) for kind in ("A", "B")]}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(listed), encoding="utf-8")
    (tmp_path / "c.yml").write_text(f"---\n---\n{yaml.safe_dump(crd({'type': 'object'}, 'C'))}", encoding="utf-8")
    (tmp_path / "README.md").write_text("not a CRD", encoding="utf-8")
    assert [one["spec"]["names"]["kind"] for one in read_crds(tmp_path)] == ["A", "B", "C"]


def test_a_folder_without_usable_crds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="There is no folder"):
        read_crds(tmp_path / "missing")
    with pytest.raises(UserInputError, match="no CustomResourceDefinition"):
        read_crds(tmp_path)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(crd({"type": "object"})), encoding="utf-8")
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(crd({"type": "object"})), encoding="utf-8")
    with pytest.raises(UserInputError, match=r"a\.yaml' and .*b\.yaml' describe JobSet"):
        read_crds(tmp_path)
    (tmp_path / "b.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(UserInputError, match=r"b\.yaml' cannot be read"):
        read_crds(tmp_path)
    (tmp_path / "b.yaml").write_text(
        "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\n", encoding="utf-8"
    )
    with pytest.raises(UserInputError, match="without a group, a kind or a schema"):
        read_crds(tmp_path)


# --- the packages behind it


def test_an_older_kubernetes_can_be_asked_for() -> None:
    manifests = render(small_job(1), "job")
    report = validate(manifests, kubernetes_version="v1.31.4")
    assert report.problems == () and report.checked["Job ft"] == "the schemas of Kubernetes 1.31"
    with pytest.raises(UserInputError, match=r"no schemas of Kubernetes 1\.2\b"):
        validate(manifests, kubernetes_version="1.2")


def test_without_the_extra_the_message_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['kubernetes_validate'] = None; sys.modules['kubeflow_trainer_api'] = None\n"
        "from shardtune.cluster import schemas\n"
        "from shardtune.errors import UserInputError\n"
        "assert not {'jsonschema', 'kubernetes', 'torch'} & set(sys.modules), 'nothing heavy is imported'\n"
        "try:\n    schemas.validate([{'apiVersion': 'v1', 'kind': 'ConfigMap'}])\n"
        "except UserInputError as error:\n    print(error.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "pip install 'shardtune[cluster]'", done.stderr
