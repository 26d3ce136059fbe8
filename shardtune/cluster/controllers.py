"""What does a controller make of a workload? Its pods, with the names and the environment they will really have.

Reads the rendered objects alone, as the controllers do: what is not in them is not in a pod either. Followed in the
sources of Training Operator 1.9, Trainer 2.0 to 2.3, JobSet 0.12 and Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

from shardtune.cluster.manifests import Manifest
from shardtune.cluster.pod_plan import PodPlan
from shardtune.cluster.quantity import parse_quantity
from shardtune.cluster.render_trainjob import ANCESTOR_LABEL, COMPLETION_INDEX_FIELD
from shardtune.errors import ShardtuneError

RANDOM = "xxxxx"  # stands for the five random characters at the end of a pod's name
_INDEX = "batch.kubernetes.io/job-completion-index"
_JOBSET = "jobset.sigs.k8s.io/"
_TRAINER_PORT = 29500
_PYTORCH_PORT, _PYTORCH_PORT_NAME = 23456, "pytorchjob-port"
# Fields of a TrainJob that change the runtime's pod, which our own TrainJobs leave to the runtime.
_NOT_FOLLOWED = ("initializer", "podSpecOverrides", "podTemplateOverrides", "runtimePatches", "labels", "annotations")


def expand(manifests: Iterable[Manifest]) -> list[PodPlan]:
    """The pods of a job, in the order of their node ranks.

    Args:
        manifests: The workload and what is made beside it; a TrainJob needs its TrainingRuntime here, and an Indexed
            Job the headless Service that its pods are named by.

    Raises:
        ShardtuneError: there is no workload, or one whose controller is not known.
    """
    objects = list(manifests)
    makers: dict[str, Callable[[Manifest, list[Manifest]], Iterator[PodPlan]]] = {
        "Job": _job_pods,
        "JobSet": _jobset_pods,
        "TrainJob": _trainjob_pods,
        "PyTorchJob": _pytorchjob_pods,
    }
    workloads = [one for one in objects if one["kind"] in makers]
    if len(workloads) != 1:
        kinds = ", ".join(one["kind"] for one in objects) or "nothing"
        raise ShardtuneError(
            f"There are {len(workloads)} workloads among the objects ({kinds}).",
            fix=f"Give one of the kinds {', '.join(makers)}, with what belongs to it.",
        )
    plans = list(makers[workloads[0]["kind"]](workloads[0], objects))
    return sorted(plans, key=lambda plan: plan.node_rank)


# --- Indexed Jobs, which are also what a JobSet is made of


def _job_pods(job: Manifest, objects: list[Manifest]) -> Iterator[PodPlan]:
    services = [one for one in objects if one["kind"] == "Service"]
    yield from _indexed_pods(job, services)


def _indexed_pods(job: Manifest, services: list[Manifest]) -> Iterator[PodPlan]:
    meta, spec = job["metadata"], job["spec"]
    if spec.get("completionMode") != "Indexed":
        raise ShardtuneError(f"The Job {meta['name']} is not Indexed: its pods have no rank.")
    for index in range(spec.get("completions", 1)):
        pod = deepcopy(spec["template"])
        index_meta = {_INDEX: str(index)}
        labels = {
            **_metadata(pod, "labels"),
            "batch.kubernetes.io/job-name": meta["name"],
            "job-name": meta["name"],
            **index_meta,
        }
        for container in _all_containers(pod["spec"]):
            if not any(entry["name"] == "JOB_COMPLETION_INDEX" for entry in container.get("env", [])):
                field = {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX}']"}}
                container["env"] = [*container.get("env", []), {"name": "JOB_COMPLETION_INDEX", "valueFrom": field}]
        pod["spec"].setdefault("hostname", f"{meta['name']}-{index}")
        yield _plan(
            f"{meta['name']}-{index}-{RANDOM}",
            meta.get("namespace"),
            rank=index,
            role="node",
            pod={"metadata": {"labels": labels, "annotations": {**_metadata(pod, "annotations"), **index_meta}},
                 "spec": pod["spec"]},
            services=services,
        )  # fmt: skip


# --- JobSet


def _jobset_pods(jobset: Manifest, _: list[Manifest]) -> Iterator[PodPlan]:
    meta, spec = jobset["metadata"], jobset["spec"]
    network = spec.get("network", {})
    subdomain = network.get("subdomain", meta["name"])
    has_names = network.get("enableDNSHostnames", True)
    service = {
        "kind": "Service",
        "metadata": {"name": subdomain},
        "spec": {"clusterIP": "None", "selector": {f"{_JOBSET}jobset-name": meta["name"]}},
    }
    jobs = [(replicated, index) for replicated in spec["replicatedJobs"] for index in range(replicated["replicas"])]
    for number, (replicated, index) in enumerate(jobs):
        own = {
            "jobset-name": meta["name"],
            "replicatedjob-name": replicated["name"],
            "replicatedjob-replicas": str(replicated["replicas"]),
            "global-replicas": str(len(jobs)),
            "job-index": str(index),
            "job-global-index": str(number),
            "restart-attempt": "0",
        }
        marks = {f"{_JOBSET}{name}": value for name, value in own.items()}
        job = deepcopy(replicated["template"])
        job["spec"].setdefault("completionMode", "Indexed")
        template = job["spec"]["template"]
        template["metadata"] = {kind: {**_metadata(template, kind), **marks} for kind in ("labels", "annotations")}
        if has_names:
            template["spec"]["subdomain"] = subdomain
        template["spec"].setdefault("restartPolicy", "OnFailure")
        name = f"{meta['name']}-{replicated['name']}-{index}"
        where = {"namespace": meta["namespace"]} if "namespace" in meta else {}
        yield from _indexed_pods(
            {"metadata": {"name": name, **where}, "spec": job["spec"]}, [service] if has_names else []
        )


# --- TrainJob


def _trainjob_pods(trainjob: Manifest, objects: list[Manifest]) -> Iterator[PodPlan]:
    jobset = _jobset_of_trainjob(trainjob, _runtime_of(trainjob, objects))
    yield from _jobset_pods(jobset, objects)


def _runtime_of(trainjob: Manifest, objects: list[Manifest]) -> Manifest:
    reference = trainjob["spec"]["runtimeRef"]
    kind = reference.get("kind", "ClusterTrainingRuntime")
    for one in objects:
        if one["kind"] == kind and one["metadata"]["name"] == reference["name"]:
            return one
    raise ShardtuneError(
        f"The TrainJob {trainjob['metadata']['name']} refers to the {kind} '{reference['name']}', which is not among "
        "the objects."
    )


def _jobset_of_trainjob(trainjob: Manifest, runtime: Manifest) -> Manifest:
    """As Trainer builds it: the runtime's template with the TrainJob's numbers, and PET_* in the container `node`."""
    for field in _NOT_FOLLOWED:
        if field in trainjob["spec"]:
            raise ShardtuneError(f"spec.{field} of a TrainJob changes its pods in a way that is not followed here.")
    trainer = trainjob["spec"].get("trainer")
    policy = runtime["spec"].get("mlPolicy", {})
    nodes = (trainer or {}).get("numNodes") or policy.get("numNodes") or 1
    spec = deepcopy(runtime["spec"]["template"]["spec"])
    ours = [
        one
        for one in spec["replicatedJobs"]
        if one["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR_LABEL) == "trainer"
    ]
    for replicated in ours[:1]:  # without the label nothing of the TrainJob arrives, and nobody complains
        replicated["replicas"] = 1
        replicated["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
        pod = replicated["template"]["spec"]["template"]["spec"]
        node = next((one for one in pod["containers"] if one["name"] == "node"), None)
        if trainer is not None and node is not None:
            _apply_trainer(node, trainer)
        if "torch" in policy:
            _inject_torch(trainjob, policy["torch"], nodes, replicated, node if trainer is not None else None)
    meta = {key: trainjob["metadata"][key] for key in ("name", "namespace") if key in trainjob["metadata"]}
    return {"kind": "JobSet", "metadata": meta, "spec": spec}


def _apply_trainer(node: Manifest, trainer: Manifest) -> None:
    if "resourcesPerNode" in trainer:
        raise ShardtuneError(
            "spec.trainer.resourcesPerNode of a TrainJob means another thing in each release: it is not followed here."
        )
    node |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    _upsert(node, trainer.get("env", []))


def _inject_torch(trainjob: Manifest, torch: Manifest, nodes: int, replicated: Manifest, node: Manifest | None) -> None:
    name = trainjob["metadata"]["name"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    processes = (trainjob["spec"].get("trainer") or {}).get("numProcPerNode", torch.get("numProcPerNode", "auto"))
    if processes == "auto":
        processes = _auto_processes(next((one for one in pod["containers"] if one["name"] == "node"), {}))
    env: list[Manifest] = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(processes)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX_FIELD}}},
        # The name of the replicated job is fixed, whatever it is called.
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(_TRAINER_PORT)},
    ]
    if node is not None:
        _upsert(node, env)
        named = [port for port in node.get("ports", []) if "name" in port]
        unnamed = [port for port in node.get("ports", []) if "name" not in port]
        node["ports"] = [*named, {"containerPort": _TRAINER_PORT}, *unnamed[1:]]  # replaces the first without a name
    for target in torch.get("envInjection", {}).get("targets", []):
        for container in _all_containers(pod) if target["jobName"] == replicated["name"] else []:
            if container["name"] in target["containerNames"]:
                _upsert(container, env)


def _auto_processes(container: Manifest) -> str | int:
    resources = container.get("resources", {})
    amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
    if any("gpu" in name for name in amounts):
        return "auto"
    return max(1, -int(-parse_quantity(str(amounts.get("cpu", "1"))) // 1))


def _upsert(container: Manifest, entries: Iterable[Manifest]) -> None:
    """Whole entries are replaced where their name is, others come at the end."""
    env = {entry["name"]: entry for entry in container.get("env", [])}
    container["env"] = list({**env, **{entry["name"]: deepcopy(entry) for entry in entries}}.values())


# --- PyTorchJob


def _pytorchjob_pods(job: Manifest, _: list[Manifest]) -> Iterator[PodPlan]:
    name, spec = job["metadata"]["name"], job["spec"]
    if "elasticPolicy" in spec or "Master" not in spec["pytorchReplicaSpecs"]:
        raise ShardtuneError(f"The PyTorchJob {name} is elastic or has no Master: it is not followed here.")
    nodes = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    for kind, first in (("Master", 0), ("Worker", 1)):
        replica = spec["pytorchReplicaSpecs"].get(kind, {"replicas": 0})
        for index in range(replica["replicas"]):
            pod = deepcopy(replica["template"])
            pod_name = f"{name}-{kind.lower()}-{index}"
            env = _pytorch_env(job, nodes, first + index)
            for container in pod["spec"]["containers"]:  # after the user's, so that these win
                container["env"] = [*container.get("env", []), *env]
            if kind == "Worker":
                pod["spec"]["initContainers"] = [*pod["spec"].get("initContainers", []), _wait_for_master(name)]
            policy = replica.get("restartPolicy", "OnFailure")
            pod["spec"]["restartPolicy"] = "Never" if policy == "ExitCode" else policy
            own = {
                "operator-name": "pytorchjob-controller", "job-name": name, "replica-type": kind.lower(),
                "replica-index": str(index), **({"job-role": "master"} if kind == "Master" else {}),
            }  # fmt: skip
            labels = {f"training.kubeflow.org/{key}": value for key, value in own.items()}
            meta = {"labels": {**_metadata(pod, "labels"), **labels}, "annotations": _metadata(pod, "annotations")}
            yield _plan(
                pod_name,
                job["metadata"].get("namespace"),
                rank=first + index,
                role=kind.lower(),
                pod={"metadata": meta, "spec": pod["spec"]},
                services=[{"metadata": {"name": pod_name}, "spec": {"clusterIP": "None", "selector": labels}}],
            )


def _pytorch_env(job: Manifest, nodes: int, rank: int) -> list[Manifest]:
    spec = job["spec"]
    master = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    ports = [port for one in master if one["name"] == "pytorch" for port in one.get("ports", [])]
    port = next((one["containerPort"] for one in ports if one.get("name") == _PYTORCH_PORT_NAME), _PYTORCH_PORT)
    processes = str(spec.get("nprocPerNode", "auto"))
    values = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": str(port),
        "PET_MASTER_PORT": str(port),
        "MASTER_ADDR": f"{job['metadata']['name']}-master-0",
        "PET_MASTER_ADDR": f"{job['metadata']['name']}-master-0",
        "WORLD_SIZE": str(nodes * (int(processes) if processes.isdigit() else 1)),
        "RANK": str(rank),  # of the pod, not of a process
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": processes,
        "PET_NNODES": str(nodes),
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _wait_for_master(job: str) -> Manifest:
    """The operator's own init container, with its default image."""
    script = f"until nslookup {job}-master-0; do sleep 2; done"
    return {
        "name": "init-pytorch",
        "image": "alpine:3.10",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script],
        "resources": {
            "requests": {"cpu": "50m", "memory": "10Mi"},
            "limits": {"cpu": "100m", "memory": "20Mi"},
        },
    }


# --- all kinds


def _plan(
    name: str, namespace: str | None, *, rank: int, role: str, pod: Manifest, services: Iterable[Manifest]
) -> PodPlan:
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    spec.setdefault("hostname", name)
    names = []
    for service in services:
        own, selector = service["metadata"]["name"], service["spec"].get("selector", {})
        if service["spec"].get("clusterIP") != "None" or not selector.items() <= labels.items():
            continue
        if own == spec.get("subdomain"):
            names.append(f"{spec['hostname']}.{own}")
        elif own == name:  # the Service of this pod alone
            names.append(own)
    return PodPlan(
        name=name,
        namespace=namespace,
        node_rank=rank,
        role=role,
        labels=labels,
        annotations=pod["metadata"]["annotations"],
        spec=spec,
        service_names=tuple(names),
    )


def _metadata(template: Manifest, kind: str) -> dict[str, str]:
    return dict(template.get("metadata", {}).get(kind, {}))


def _all_containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]
