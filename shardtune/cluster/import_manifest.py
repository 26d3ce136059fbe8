"""What does a Kubernetes manifest ask for? PyTorchJob, TrainJob, JobSet and Job become a section `cluster`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import yaml

from shardtune.cluster.import_command import ReadScript, import_command
from shardtune.cluster.import_differences import template_differences
from shardtune.cluster.import_pod import import_env, import_image, import_labels, import_resources, import_template
from shardtune.cluster.import_report import Imported, validated
from shardtune.cluster.import_values import NOT_IN_THE_COMMAND, secret_steps
from shardtune.cluster.pod import merge_overlay
from shardtune.cluster.spec import check_name
from shardtune.errors import UserInputError

_KINDS = {"PyTorchJob": "pytorchjob", "TrainJob": "trainjob", "JobSet": "jobset", "Job": "job"}
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
_BY_US = "The rendered job sets it."
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_Fields = dict[str, Any]


def import_manifest(text: str, file: str, read_script: ReadScript, *, keep_uid: bool = False) -> Imported:
    """The section `cluster` for the one job in a YAML file; other documents beside it are answered too.

    Raises:
        UserInputError: not YAML, or not exactly one job of a kind that is known.
    """
    documents = _documents(text, file)
    jobs = [one for one in documents if one.get("kind") in _KINDS]
    if len(jobs) != 1:
        seen = ", ".join(str(one.get("kind")) for one in documents) or "nothing"
        raise UserInputError(
            f"'{file}' holds {len(jobs) or 'no'} job{'s' if len(jobs) != 1 else ''} that can be imported ({seen}).",
            fix=f"Name a file with one {', '.join(list(_KINDS)[:-1])} or Job.",
        )
    job, found = jobs[0], Imported()
    found.section["target"] = _KINDS[str(job["kind"])]
    _import_metadata(found, job.get("metadata") or {})
    read = _Reader(found, read_script, keep_uid)
    spec = copy.deepcopy(job.get("spec") or {})
    if job["kind"] == "TrainJob":
        read.train_job(spec, [one for one in documents if one.get("kind") in _RUNTIMES])
    else:
        {"PyTorchJob": read.pytorch_job, "JobSet": read.job_set, "Job": read.job}[str(job["kind"])](spec)
    for other in documents:
        if other is not job and (other.get("kind") not in _RUNTIMES or job["kind"] != "TrainJob"):
            _import_other(found, other)
    if found.section["target"] == "runai" and "pod_overlay" in found.section:
        found.warn("pod_overlay", NOT_IN_THE_COMMAND)
    secret_steps(found, found.section.get("namespace"))
    validated(found)
    return found


def _documents(text: str, file: str) -> list[dict[str, Any]]:
    try:
        loaded = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        raise UserInputError(f"'{file}' is not valid YAML.", why=str(error), fix="Correct that line.") from error
    found: list[dict[str, Any]] = []
    for one in loaded:
        items = one.get("items") if isinstance(one, dict) and one.get("kind") == "List" else [one]
        found += [item for item in items or [] if isinstance(item, dict)]
    return found


def _import_metadata(found: Imported, metadata: Mapping[str, Any]) -> None:
    if name := metadata.get("name"):
        try:
            check_name(str(name))
            found.set(
                "metadata.name", name, "job_name", str(name), "A name stands for one run: leave it out for others."
            )
        except UserInputError as error:
            found.add("metadata.name", name, "changed", f"Left out: {error.why}")
    if namespace := metadata.get("namespace"):
        found.set("metadata.namespace", namespace, "namespace", str(namespace))
    import_labels(found, "metadata.labels", metadata.get("labels") or {})
    for name in metadata.get("annotations") or {}:
        if not name.startswith("kubectl.kubernetes.io/"):
            found.add(f"metadata.annotations.{name}", "", "not supported", "Only pods have annotations here.")


def _import_other(found: Imported, other: Mapping[str, Any]) -> None:
    kind, name = str(other.get("kind")), str((other.get("metadata") or {}).get("name"))
    why = {
        "Service": "The rendered job brings its own.",
        "ConfigMap": "The config reaches the pods by itself; keep the object if something else needs it.",
        "Secret": "Not read. It has to exist in the namespace where secret_env names it.",
        "PersistentVolumeClaim": "It has to exist; volumes names it.",
    }.get(kind, "Not part of the job.")
    found.add(kind, name, "no effect", why)


class _Reader:
    """Reads the specs of the kinds into one `Imported`."""

    def __init__(self, found: Imported, read_script: ReadScript, keep_uid: bool) -> None:
        self.found, self._read_script, self._keep_uid = found, read_script, keep_uid

    def pytorch_job(self, spec: _Fields) -> None:
        replicas = spec.pop("pytorchReplicaSpecs", None) or {}
        roles = {role: one for role, one in replicas.items() if one}
        if not roles:
            raise UserInputError("The PyTorchJob has no pytorchReplicaSpecs.", fix="Give its pods a template.")
        counts = {role: int(one.get("replicas", 1)) for role, one in roles.items()}
        self._nodes(
            "pytorchReplicaSpecs", " + ".join(f"{role} {n}" for role, n in counts.items()), sum(counts.values())
        )
        first = next(iter(roles))
        templates = {role: one.get("template") or {} for role, one in roles.items()}
        for role, one in roles.items():
            if "restartPolicy" in one:
                self.found.add(f"{role}.restartPolicy", one["restartPolicy"], "no effect", _BY_US)
            if templates[role] != templates[first]:
                self._report_difference(first, role, templates)
        self._template(f"{first}.template", templates[first])
        self._processes("nprocPerNode", spec.pop("nprocPerNode", None))
        if "elasticPolicy" in spec:
            why = "The number of nodes is fixed; the nodes find each other without it."
            self.found.add("elasticPolicy", ", ".join(spec.pop("elasticPolicy") or {}), "not supported", why)
        self._run_policy(spec.pop("runPolicy", None) or {})
        self._rest(spec, "spec")

    def job(self, spec: _Fields, where: str = "spec") -> None:
        count = spec.pop("completions", None) or spec.pop("parallelism", None) or 1
        spec.pop("parallelism", None)
        self._nodes(f"{where}.completions", count, int(count))
        template = spec.pop("template", None) or {}
        limit = spec.pop("backoffLimit", None)
        if limit is not None:
            self.found.set(f"{where}.backoffLimit", limit, "restarts", int(limit), verdict="translated")
        self._run_policy(spec)
        for name in ("completionMode", "podFailurePolicy", "backoffLimitPerIndex", "selector", "suspend",
                     "podReplacementPolicy", "manualSelector"):  # fmt: skip
            if name in spec:
                self.found.add(f"{where}.{name}", spec.pop(name), "no effect", _BY_US)
        self._template(f"{where}.template", template)
        self._rest(spec, where)

    def job_set(self, spec: _Fields) -> None:
        jobs = spec.pop("replicatedJobs", None) or []
        if not jobs:
            raise UserInputError("The JobSet has no replicatedJobs.", fix="Give it the job that trains.")
        main = max(jobs, key=_gpus)
        for other in jobs:
            if other is not main:
                why = "Only the job with the most GPUs is imported; the others do something else."
                self.found.add(f"replicatedJobs.{other.get('name')}", "", "not supported", why)
        restarts = (spec.pop("failurePolicy", None) or {}).get("maxRestarts")
        if restarts is not None:
            self.found.set("failurePolicy.maxRestarts", restarts, "restarts", int(restarts), verdict="translated")
        inner = copy.deepcopy((main.get("template") or {}).get("spec") or {})
        if restarts is not None and "backoffLimit" in inner:
            self.found.add("backoffLimit", inner.pop("backoffLimit"), "no effect", _BY_US)
        replicas = int(main.get("replicas", 1))
        if replicas > 1:
            pods = inner.get("completions") or inner.get("parallelism") or 1
            inner["completions"] = replicas * int(pods)
        self.job(inner, f"replicatedJobs.{main.get('name')}")
        self._run_policy(spec)
        for name in ("network", "successPolicy", "startupPolicy", "suspend", "coordinator", "managedBy"):
            if name in spec:
                self.found.add(f"spec.{name}", spec.pop(name), "no effect", _BY_US)
        self._rest(spec, "spec")

    def train_job(self, spec: _Fields, runtimes: list[dict[str, Any]]) -> None:
        trainer = spec.pop("trainer", None) or {}
        reference = spec.pop("runtimeRef", None) or {}
        runtime = _runtime(reference, runtimes)
        policy: Mapping[str, Any] = {}
        if runtime is None:
            name, kind = reference.get("name", ""), reference.get("kind", "ClusterTrainingRuntime")
            why = (
                f"The runtime is not in the file: add `kubectl get {kind.lower()} {name} -o yaml` to it as a document."
            )
            self.found.add(
                "runtimeRef", name, "not supported", f"{why} Without it, only the TrainJob's own fields count."
            )
        else:
            policy = (runtime.get("spec") or {}).get("mlPolicy") or {}
            self.found.add("runtimeRef", reference.get("name"), "translated", "Its pod template was read.")
            template = _runtime_template(runtime, spec, trainer)
            self._template("runtime.template", template)
        self._trainer(trainer, policy, is_merged=runtime is not None)
        for name in ("podSpecOverrides", "podTemplateOverrides", "runtimePatches"):
            if name in spec:
                spec.pop(name)
                verdict = (
                    "Merged into the runtime's template." if runtime else "They change a runtime that is not here."
                )
                self.found.add(name, "", "translated" if runtime else "not supported", verdict)
        if "initializer" in spec:
            why = "Model and data are read from volumes: prepare them there first."
            self.found.add("initializer", ", ".join(spec.pop("initializer") or {}), "not supported", why)
        self._run_policy(spec)
        for name in ("suspend", "managedBy"):
            if name in spec:
                self.found.add(f"spec.{name}", spec.pop(name), "no effect", _BY_US)
        self._rest(spec, "spec")

    def _trainer(self, trainer: _Fields, policy: Mapping[str, Any], *, is_merged: bool) -> None:
        nodes = trainer.pop("numNodes", None) or policy.get("numNodes") or 1
        self._nodes("trainer.numNodes", nodes, int(nodes))
        self._processes("trainer.numProcPerNode", trainer.pop("numProcPerNode", None))
        if is_merged:
            return
        if image := trainer.pop("image", None):
            import_image(self.found, "trainer.image", str(image))
        words = [*(trainer.pop("command", None) or []), *(trainer.pop("args", None) or [])]
        if words:
            import_command(self.found, "trainer.command", [str(word) for word in words], self._read_script)
        import_env(self.found, "trainer.env", trainer.pop("env", None) or [])
        import_resources(self.found, "trainer.resourcesPerNode", trainer.pop("resourcesPerNode", None) or {})
        self._rest(trainer, "trainer")

    def _template(self, where: str, template: Mapping[str, Any]) -> None:
        import_template(self.found, where, template, self._read_script, self._keep_uid)

    def _nodes(self, key: str, value: object, number: int) -> None:
        self.found.set(key, value, "nodes", number, verdict="translated")

    def _processes(self, key: str, value: object) -> None:
        if value is None:
            return
        if str(value) in ("auto", "gpu", str(self.found.section.get("gpus_per_node"))):
            self.found.add(key, value, "honoured", "One process per GPU is the default.")
        else:
            why = "Not part of cluster: set parallel.nproc if it is not to be one process per GPU."
            self.found.add(key, value, "not supported", why)

    def _run_policy(self, policy: _Fields) -> None:
        hours: list[tuple[str, str]] = [
            ("activeDeadlineSeconds", "max_hours"),
            ("ttlSecondsAfterFinished", "keep_hours"),
        ]
        for name, setting in hours:
            if (value := policy.pop(name, None)) is not None:
                self.found.set(name, value, setting, round(int(value) / 3600, 4), verdict="translated")
        if (limit := policy.pop("backoffLimit", None)) is not None:
            self.found.set("backoffLimit", limit, "restarts", int(limit), verdict="translated")
        for name in ("cleanPodPolicy", "suspend", "managedBy"):
            if name in policy:
                self.found.add(name, policy.pop(name), "no effect", _BY_US)
        if scheduling := policy.pop("schedulingPolicy", None):
            why = "Set gang_scheduling (volcano, coscheduling) or queue (Kueue)."
            self.found.add("schedulingPolicy", ", ".join(scheduling), "not supported", why)

    def _report_difference(self, first: str, role: str, templates: Mapping[str, Mapping[str, Any]]) -> None:
        """A line for every field: all nodes are alike, and what the other role has instead is lost."""
        for one in template_differences(templates[first], templates[role]):
            used = f" ({one.shown_first})" if one.shown_first else ""
            if one.other is None:
                why = f"{role} has none. All nodes are alike, so it gets {first}'s{used}."
            elif one.first is None:
                why = f"Left out: all nodes are alike, and {first} has none."
            else:
                why = f"Left out: all nodes are alike, and {first}'s{used} is used."
            self.found.add(f"{role}.template.{one.path}", one.shown_other, "changed", why)

    def _rest(self, fields: Mapping[str, Any], where: str) -> None:
        for name in fields:
            self.found.add(f"{where}.{name}", "", "not known", "Nothing was written for it.")


def _gpus(job: Mapping[str, Any]) -> int:
    template = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
    limits = [
        ((one.get("resources") or {}).get("limits") or {})
        for one in (template.get("spec") or {}).get("containers") or []
    ]
    return sum(int(amount) for one in limits for name, amount in one.items() if "gpu" in name and str(amount).isdigit())


def _runtime(reference: Mapping[str, Any], runtimes: list[dict[str, Any]]) -> dict[str, Any] | None:
    name = reference.get("name")
    return next((one for one in runtimes if (one.get("metadata") or {}).get("name") == name), None)


def _runtime_template(runtime: Mapping[str, Any], spec: _Fields, trainer: _Fields) -> _Fields:
    """The pod template of the runtime's trainer with what the TrainJob changes in it, as the controller merges them."""
    jobs = (((runtime.get("spec") or {}).get("template") or {}).get("spec") or {}).get("replicatedJobs") or []
    labelled = (
        one for one in jobs if ((one.get("template") or {}).get("metadata") or {}).get("labels", {}).get(_STEP_LABEL)
    )
    job = next(labelled, jobs[0] if jobs else {})
    template: _Fields = copy.deepcopy(((job.get("template") or {}).get("spec") or {}).get("template") or {})
    for patch in _patches(spec, str(job.get("name"))):
        template = merge_overlay(template, patch)
    container: _Fields = {"name": "node"}
    for field in ("image", "command", "args", "env"):
        if trainer.get(field):
            container[field] = trainer.pop(field)
    if resources := trainer.pop("resourcesPerNode", None):
        container["resources"] = resources
    merged: _Fields = merge_overlay({"spec": {"containers": []}, **template}, {"spec": {"containers": [container]}})
    return merged


def _patches(spec: Mapping[str, Any], job: str) -> list[_Fields]:
    """Changes of the pod template in the fields of all releases."""
    found: list[_Fields] = []
    for one in spec.get("podSpecOverrides") or []:
        found.append({"spec": {name: value for name, value in one.items() if name != "targetJobs"}})
    for one in spec.get("podTemplateOverrides") or []:
        found.append({name: one[name] for name in ("metadata", "spec") if name in one})
    for one in spec.get("runtimePatches") or []:
        inner = ((one.get("trainingRuntimeSpec") or {}).get("template") or {}).get("spec") or {}
        for patch in inner.get("replicatedJobs") or []:
            if patch.get("name") == job:
                found.append(((patch.get("template") or {}).get("spec") or {}).get("template") or {})
    return found
