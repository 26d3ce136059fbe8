"""What does a check look at? The job's settings, its pods after the overlay, and the run.yaml that they will read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from shardtune.cluster.pod import CONTAINER, pod_template
from shardtune.config.expansion import variables
from shardtune.config.references import Reference
from shardtune.config.yaml_reader import read_yaml

if TYPE_CHECKING:
    from shardtune.cluster.manifests import Manifest, Manifests
    from shardtune.cluster.spec import ClusterJob
    from shardtune.config.cluster_schema import ClusterSection
    from shardtune.plan.report import Plan

KUBERNETES = ("runai", "trainjob", "pytorchjob", "jobset", "job")
_TRAINER_NAMES = (CONTAINER, "pytorch", "node")  # as pod_overlay knows it, and as kinds call it


@dataclass(frozen=True)
class Pod:
    """A pod template, and where it is in the rendered objects."""

    path: str
    template: Manifest

    @property
    def spec(self) -> Manifest:
        return dict(self.template.get("spec") or {})

    @property
    def metadata(self) -> Manifest:
        return dict(self.template.get("metadata") or {})

    @property
    def containers(self) -> list[tuple[str, Manifest]]:
        """All of them, with their paths; the init containers last."""
        return [
            (f"{self.path}.spec.{kind}[{index}]", container)
            for kind in ("containers", "initContainers")
            for index, container in enumerate(self.spec.get(kind) or ())
        ]

    @property
    def trainer(self) -> tuple[str, Manifest]:
        """The container that trains."""
        named = (pair for pair in self.containers if pair[1].get("name") in _TRAINER_NAMES)
        return next(named, self.containers[0])


@dataclass(frozen=True)
class Variable:
    """An environment variable that the user has set; `value` None where a Secret has it."""

    name: str
    value: str | None
    path: str


@dataclass(frozen=True)
class Subject:
    """What all checks see.

    Attributes:
        target: Where the job goes (`cluster.target`).
        manifests: None where the target has none (Slurm, containers here); the pod is looked at all the same.
    """

    job: ClusterJob
    target: str
    manifests: Manifests | None = None
    plan: Plan | None = field(default=None, repr=False)
    crds: Sequence[Manifest] = field(default=(), repr=False)

    @property
    def settings(self) -> ClusterSection:
        return self.job.settings

    @property
    def is_kubernetes(self) -> bool:
        return self.target in KUBERNETES

    @property
    def kind(self) -> str:
        """Of the workload: Run:ai takes one of the others."""
        return self.settings.runai_kind if self.target == "runai" else self.target

    @property
    def workload_kind(self) -> str:
        """Of the object that was rendered, also for a target that only borrows it (local-pods)."""
        return self.kind if self.manifests is None else str(self.manifests.workload["kind"]).lower()

    @property
    def has_gpus(self) -> bool:
        settings = self.settings
        return bool(settings.gpus_per_node) or settings.gpu_resource in settings.extended_resources

    @cached_property
    def pods(self) -> list[Pod]:
        if self.manifests is None:
            return [Pod("pod", pod_template(self.job))]
        return [Pod(_path_of(self.manifests, template), template) for template in self.manifests.templates.values()]

    @property
    def containers(self) -> list[tuple[str, Manifest]]:
        return [pair for pod in self.pods for pair in pod.containers]

    @cached_property
    def variables(self) -> list[Variable]:
        """What the user sets, in the settings or in the overlay; not what we or the kind set."""
        found = [Variable(name, value, f"cluster.env.{name}") for name, value in self.settings.env.items()]
        found += [Variable(name, None, f"cluster.secret_env.{name}") for name in self.settings.secret_env]
        names = _overlay_variables(self.settings.pod_overlay)
        for path, container in self.containers:
            for index, entry in enumerate(container.get("env") or ()):
                if entry.get("name") in names:
                    value = None if entry.get("valueFrom") else str(entry.get("value", ""))
                    found.append(Variable(str(entry["name"]), value, f"{path}.env[{index}]"))
        last = {(one.name, one.value): one for one in reversed(found)}  # the same in every role: once
        return list(reversed(last.values()))

    def value_of(self, name: str) -> str | None:
        """The value that the container that trains gets, where it is a plain one."""
        _, container = self.pods[0].trainer
        values = [str(entry.get("value", "")) for entry in container.get("env") or () if entry.get("name") == name]
        return values[-1] if values else None

    @cached_property
    def environment(self) -> dict[str, str]:
        """All variables of the container that trains; those from Secrets are empty here."""
        _, container = self.pods[0].trainer
        return {str(entry.get("name")): str(entry.get("value") or "") for entry in container.get("env") or ()}

    @cached_property
    def run_values(self) -> Mapping[str, Any]:
        """The run's settings by dotted path, as a pod reads them."""
        return {path: _value(leaf) for path, leaf in self.run_leaves}

    @cached_property
    def run_leaves(self) -> list[tuple[str, Any]]:
        """The same with a `Reference` for every value with ${VAR} in it."""
        if self.job.config is None:
            return []
        known = ((name, self.environment.get(name, "")) for name in variables(self.job.config))
        return _read_run(self.job.config, tuple(known))

    def in_container(self, name: str) -> PurePosixPath:
        """A path of the run, absolute."""
        return PurePosixPath(self.settings.working_dir or "/") / name


@lru_cache(maxsize=8)
def _read_run(text: str, known: tuple[tuple[str, str], ...]) -> list[tuple[str, Any]]:
    tree, _ = read_yaml(text, "run.yaml", dict(known))
    return list(_leaves(tree.written(), "")) if tree is not None else []


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Reference) else leaf


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _overlay_variables(overlay: Mapping[str, Any]) -> set[str]:
    spec = overlay.get("spec") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    return {str(entry.get("name")) for container in containers for entry in container.get("env") or ()}


def _path_of(manifests: Manifests, template: Manifest) -> str:
    """Where the very same dict is: `spec.template`, or with its kind in an object beside the workload."""
    for manifest in (manifests.workload, *manifests.support):
        for path, inside in _inside(manifest, ""):
            if inside is template:
                return path if manifest is manifests.workload else f"{manifest.get('kind')}:{path}"
    return "pod"


def _inside(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            yield from _inside(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _inside(item, f"{path}[{index}]")
