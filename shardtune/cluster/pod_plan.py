"""What will a pod be? Its names, its containers and the environment of each, as a kubelet would start them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardtune.cluster.manifests import Manifest
from shardtune.errors import ShardtuneError

StoredValues = Mapping[tuple[str, str], Mapping[str, str]]  # ("Secret" | "ConfigMap", its name) → its keys
_METADATA_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


@dataclass(frozen=True)
class PodPlan:
    """A pod that a controller will make.

    Attributes:
        name: The five random characters at the end of a Job's pods are written `xxxxx`.
        namespace: None = that of the context.
        node_rank: Of the pod among those of the run.
        role: `node`, `master` or `worker`.
        spec: The whole pod spec, after everything that the controller adds.
        service_names: Names under which other pods of the namespace reach this one, through a headless Service.
    """

    name: str
    namespace: str | None
    node_rank: int
    role: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Manifest
    service_names: tuple[str, ...]

    @property
    def hostname(self) -> str:
        return str(self.spec["hostname"])

    @property
    def subdomain(self) -> str | None:
        return self.spec.get("subdomain")

    @property
    def container(self) -> Manifest:
        """The one that trains: the first."""
        found: Manifest = self.spec["containers"][0]
        return found

    @property
    def init_containers(self) -> tuple[Manifest, ...]:
        return tuple(self.spec.get("initContainers", ()))

    @property
    def command(self) -> list[str]:
        """As written; the kubelet applies `expand_references` to each word."""
        return [*self.container.get("command", []), *self.container.get("args", [])]

    @property
    def working_dir(self) -> str | None:
        return self.container.get("workingDir")

    @property
    def resources(self) -> Manifest:
        return dict(self.container.get("resources", {}))

    @property
    def mounts(self) -> list[Manifest]:
        return list(self.container.get("volumeMounts", []))

    @property
    def volumes(self) -> Mapping[str, Manifest]:
        """By name, without it."""
        return {
            volume["name"]: {key: value for key, value in volume.items() if key != "name"}
            for volume in self.spec.get("volumes", [])
        }

    @property
    def grace_seconds(self) -> int:
        return int(self.spec.get("terminationGracePeriodSeconds", 30))

    @property
    def dns_names(self) -> tuple[str, ...]:
        """`service_names` with every ending that a resolver in the cluster knows."""
        where = self.namespace or "default"
        endings = ("", f".{where}", f".{where}.svc", f".{where}.svc.cluster.local")
        return tuple(f"{name}{ending}" for name in self.service_names for ending in endings)

    def env(self, stored: StoredValues, container: Manifest | None = None) -> dict[str, str]:
        """The environment of a container as the kubelet makes it: `envFrom` first, then `env` in its order, where the
        last entry of a name wins, fields of the pod are looked up, and $(NAME) stands for an earlier variable.

        Args:
            stored: What Secrets and ConfigMaps hold.
            container: Default: the one that trains.

        Raises:
            ShardtuneError: it refers to what is not in `stored`, or not in the pod.
        """
        chosen = self.container if container is None else container
        values: dict[str, str] = {}
        for source in chosen.get("envFrom", []):
            kind, reference = _stored_reference(source, {"secretRef": "Secret", "configMapRef": "ConfigMap"})
            found = stored.get((kind, reference["name"]))
            if found is None and not reference.get("optional"):
                raise ShardtuneError(f"{self.name} refers to the {kind} '{reference['name']}', which is not given.")
            values |= {source.get("prefix", "") + key: value for key, value in (found or {}).items()}
        for entry in chosen.get("env", []):
            if "valueFrom" not in entry:
                values[entry["name"]] = expand_references(entry.get("value", ""), values)
                continue
            found_value = self._value_from(entry["name"], entry["valueFrom"], stored)
            if found_value is not None:
                values[entry["name"]] = found_value
        return values

    def _value_from(self, name: str, source: Manifest, stored: StoredValues) -> str | None:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        kind, reference = _stored_reference(source, {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"})
        found = stored.get((kind, reference["name"]), {}).get(reference["key"])
        if found is None and not reference.get("optional"):
            where = f"'{reference['key']}' of the {kind} '{reference['name']}'"
            raise ShardtuneError(f"{name} in {self.name} is {where}, which is not given.")
        return found

    def _field(self, path: str) -> str:
        mapping = _METADATA_FIELD.fullmatch(path)
        if mapping is not None:
            return {"labels": self.labels, "annotations": self.annotations}[mapping[1]].get(mapping[2], "")
        known = {"metadata.name": self.name, "metadata.namespace": self.namespace or "default"}
        known |= {"spec.serviceAccountName": self.spec.get("serviceAccountName", "default")}
        if path not in known:
            raise ShardtuneError(f"The field {path} of {self.name} is known only once the pod runs.")
        return known[path]


def pod_manifest(plan: PodPlan) -> Manifest:
    """The pod as an object of its own, for a dry run: CRDs do not check the pod inside them."""
    metadata: Manifest = {"name": plan.name, "labels": dict(plan.labels)}
    if plan.namespace:
        metadata["namespace"] = plan.namespace
    if plan.annotations:
        metadata["annotations"] = dict(plan.annotations)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": plan.spec}


def resolver(plans: Iterable[PodPlan]) -> dict[str, PodPlan]:
    """Which pod a DNS name leads to."""
    return {name: plan for plan in plans for name in plan.dns_names}


def stored_values(manifests: Iterable[Manifest]) -> dict[tuple[str, str], dict[str, str]]:
    """What the ConfigMaps and Secrets of a job hold, for `PodPlan.env`."""
    return {
        (one["kind"], one["metadata"]["name"]): {**one.get("data", {}), **one.get("stringData", {})}
        for one in manifests
        if one["kind"] in ("ConfigMap", "Secret")
    }


def _stored_reference(source: Manifest, kinds: Mapping[str, str]) -> tuple[str, Manifest]:
    for field, kind in kinds.items():
        if field in source:
            return kind, source[field]
    raise ShardtuneError(f"A variable from {', '.join(source)} is known only once the pod runs.")


def expand_references(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` by its value, `$$` as `$`; a name that is not set stays as it is. In values and in commands."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else values.get(found[1], found[0]), text)
