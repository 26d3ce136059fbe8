"""Which kinds of objects are there? Where each is in the API, and which operator brings what Kubernetes lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resource:
    """A kind of object.

    Attributes:
        version: As `apiVersion` has it: `v1`, `batch/v1`.
        operator: What has to be installed for it; empty for what every cluster has.
    """

    version: str
    kind: str
    plural: str
    operator: str = ""
    namespaced: bool = True

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Of a request; `namespace` None = all of them."""
        group, _, version = self.version.rpartition("/")
        parts = ["/apis", group, version] if group else ["/api", version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        return "/".join(part for part in (*parts, self.plural, name, subresource) if part)


POD = Resource("v1", "Pod", "pods")
NAMESPACE = Resource("v1", "Namespace", "namespaces", namespaced=False)
EVENT = Resource("v1", "Event", "events")
SECRET = Resource("v1", "Secret", "secrets")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")
SERVICE = Resource("v1", "Service", "services")
CLAIM = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
JOB = Resource("batch/v1", "Job", "jobs")
JOBSET = Resource("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", "JobSet (jobset.sigs.k8s.io)")
PYTORCHJOB = Resource("kubeflow.org/v1", "PyTorchJob", "pytorchjobs", "Kubeflow Training Operator 1.x")
TRAINJOB = Resource("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", "Kubeflow Trainer 2.x")
TRAINING_RUNTIME = Resource(
    "trainer.kubeflow.org/v1alpha1", "TrainingRuntime", "trainingruntimes", "Kubeflow Trainer 2.x"
)
CUSTOM_RESOURCE = Resource(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
KUEUE = "kueue.x-k8s.io"

# The kinds whose controllers make a job's pods, in the order in which they are looked for. A TrainJob's own JobSet has
# the same name and is no job of its own.
WORKLOADS = (TRAINJOB, PYTORCHJOB, JOBSET, JOB)
_KNOWN = (
    POD, EVENT, SECRET, CONFIG_MAP, SERVICE, CLAIM, JOB, JOBSET, PYTORCHJOB, TRAINJOB, TRAINING_RUNTIME,
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    Resource("scheduling.x-k8s.io/v1alpha1", "PodGroup", "podgroups", "the coscheduling plugin of kube-scheduler"),
    Resource("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups", "Volcano"),
)  # fmt: skip
_BY_KIND = {(one.version, one.kind): one for one in _KNOWN}


def resource_of(manifest: Mapping[str, Any]) -> Resource:
    """Where an object belongs. A kind that is not in the table is guessed as Kubernetes names things."""
    version, kind = str(manifest["apiVersion"]), str(manifest["kind"])
    return _BY_KIND.get((version, kind)) or Resource(version, kind, f"{kind.lower()}s")


def kueue_workloads(version: str) -> Resource:
    return Resource(f"{KUEUE}/{version}", "Workload", "workloads", "Kueue")
