"""Does the job ask for what it means? Memory and its units, CPUs, GPUs and extended resources, /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint_finding import Finding, Rule, error, notice, warning
from shardtune.cluster.pod import resources
from shardtune.cluster.quantity import has_unit, parse_quantity
from shardtune.terminal import count, size

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Pod, Subject

RULES = (
    Rule(
        "quantity",
        "error",
        "`96GB`, `96gb`, `96 G`, `96g`, `96GiB`: not a quantity of Kubernetes.",
        "The API server refuses it.",
    ),
    Rule(
        "memory-unit",
        "error",
        "Memory, storage or `/dev/shm` without a unit: `3846` is 3846 bytes.",
        "Every API server accepts it; the pod is killed when it starts, or placed as if it needed nothing. From 1"
        " GiB on (a number of bytes that may be meant) it is a warning.",
    ),
    Rule(
        "memory-too-small",
        "error",
        "Memory of the training below 1Gi, `96m` (a tenth of a byte) among it.",
        "Importing torch takes more.",
    ),
    Rule(
        "missing-memory",
        "warning",
        "No memory is requested.",
        "The pod is placed on a node without room for it, and evicted first.",
    ),
    Rule(
        "missing-cpu",
        "warning",
        "No CPU is requested.",
        "Data loading gets what others leave.",
    ),
    Rule(
        "cpu-amount",
        "error",
        "More than 256 cores (`500` for `500m`; an error from 1024 on), or less than one core for each process "
        "(warning).",
        "No node has them, and the pod stays pending; or the GPUs wait for their data.",
    ),
    Rule(
        "request-above-limit",
        "error",
        "A request above its limit.",
        "The API server refuses it.",
    ),
    Rule(
        "extended-resource-amount",
        "error",
        "An extended resource (a GPU, a NIC) whose request is not its limit, that has no limit, or is not a whole"
        " number.",
        "The API server refuses it.",
    ),
    Rule(
        "extended-resource-name",
        "error",
        "A resource that is not called DOMAIN/NAME.",
        "The API server refuses it.",
    ),
    Rule(
        "gpu-count",
        "error",
        "More processes than GPUs, GPUs asked for twice, or no GPUs at all (a warning).",
        "Each process needs a GPU of its own.",
    ),
    Rule(
        "shm-size",
        "error",
        "`/dev/shm` larger than the memory limit; or none (a warning).",
        "It is memory of the pod: filling it gets the pod killed. Without it a container has 64 MiB.",
    ),
)

_GIB = 2**30
_MOST_CORES, _IMPOSSIBLE_CORES = 256, 1024
_NATIVE = ("cpu", "memory", "ephemeral-storage")
_WRITTEN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def check_resources(subject: Subject) -> Iterator[Finding]:
    yield from _check_settings(subject)
    ours = resources(subject.job)
    for path, container in subject.containers:
        asked = container.get("resources") or {}
        for part in ("requests", "limits"):
            for name, value in (asked.get(part) or {}).items():
                if str(value) != str((ours.get(part) or {}).get(name)):  # the settings' are checked as settings
                    yield from _check_amount(f"{path}.resources.{part}.{name}", name, str(value))
        yield from _check_pairs(f"{path}.resources", asked)
    for pod in subject.pods:
        yield from _check_missing(subject, pod)
        yield from _check_shared_memory(subject, pod)
    yield from _check_gpus(subject)


def amount(text: Any) -> Decimal | None:
    """A quantity's number; None where it is none, which another rule reports."""
    try:
        return parse_quantity(str(text))
    except ValueError:
        return None


def _check_settings(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    for name in ("memory", "memory_limit"):
        if value := getattr(settings, name):
            yield from _check_amount(f"cluster.{name}", "memory", value)
    for name in ("cpu", "cpu_limit"):
        if value := getattr(settings, name):
            yield from _check_amount(f"cluster.{name}", "cpu", value)
    if settings.ephemeral_storage:
        yield from _check_bytes("cluster.ephemeral_storage", settings.ephemeral_storage)
    if settings.shared_memory != "auto":
        yield from _check_bytes("cluster.shared_memory", settings.shared_memory)
    for name, value in settings.extended_resources.items():
        yield from _check_amount(f"cluster.extended_resources.{name}", name, value)
    if settings.gpus_per_node:
        yield from _check_name("cluster.gpu_resource", settings.gpu_resource)
    cores = amount(settings.cpu or "")
    if cores is not None and settings.gpus_per_node and cores < subject.job.nproc:
        what = f"{settings.cpu} CPU cores for {count(subject.job.nproc, 'process', 'es')}"
        yield warning("cpu-amount", "cluster.cpu", what, "Ask for several cores per GPU (8 to 16 are usual).")


def _check_amount(path: str, resource: str, text: str) -> Iterator[Finding]:
    if resource == "memory":
        yield from _check_bytes(path, text)
        number = amount(text)
        if number is not None and has_unit(text) and number < _GIB:
            fix = f"Write {text[:-1]}G or {text[:-1]}Gi." if text.endswith(("m", "k")) else "Write at least 1Gi."
            yield error("memory-too-small", path, f"{text} is {_bytes(number)}", fix)
    elif resource == "cpu":
        yield from _check_cores(path, text)
    elif resource == "ephemeral-storage" or resource.startswith("hugepages-"):
        yield from _check_bytes(path, text)
    else:
        yield from _check_name(path, resource)
        number = amount(text)
        if number is None or number != int(number) or number < 0:
            what = f"'{text}' of {resource} is not a whole number"
            yield error("extended-resource-amount", path, what, "Write a whole number, such as 1.")


def _check_bytes(path: str, text: str) -> Iterator[Finding]:
    number = amount(text)
    if number is None:
        yield error("quantity", path, f"'{text}' is not a quantity of Kubernetes", _instead_of_bytes(text))
    elif not has_unit(text):
        if number < _GIB:
            what = f"{text} has no unit, and means {_bytes(number)}"
            yield error("memory-unit", path, what, f"Write {text}Mi or {text}Gi.")
        else:
            mebibytes = int(number) // 2**20
            what = f"{text} has no unit, and means bytes ({_bytes(number)})"
            yield warning("memory-unit", path, what, f"Write {mebibytes}Mi.")


def _bytes(number: Decimal) -> str:
    if number < 1:
        return f"{number.normalize():f} bytes"
    return f"{number:,} bytes" if number < 2**20 else size(float(number))


def _instead_of_bytes(text: str) -> str:
    """What was meant: GB is G, GiB is Gi, whatever the case."""
    found = _WRITTEN.fullmatch(text)
    number, unit = (found[1], found[2].lower()) if found else ("", "")
    letter = unit[:1].upper()
    if not found or letter not in ("K", "M", "G", "T", "P") or unit[1:] not in ("", "b", "i", "ib", "bytes"):
        return "Write a number and Mi, Gi or Ti, such as 96Gi."
    binary = "Ki" if letter == "K" else f"{letter}i"
    if unit[1:] in ("i", "ib"):
        return f"Write {number}{binary}."
    return f"Write {number}{'k' if letter == 'K' else letter} (powers of 1000) or {number}{binary} (of 1024)."


def _check_cores(path: str, text: str) -> Iterator[Finding]:
    number = amount(text)
    if number is None:
        found = _WRITTEN.fullmatch(text)
        fix = f"Write {found[1]}." if found else "Write a number of cores (16), or thousandths of one (500m)."
        yield error("quantity", path, f"'{text}' is not a quantity of Kubernetes", fix)
    elif number > _MOST_CORES:
        report = error if number >= _IMPOSSIBLE_CORES else warning
        digits = re.match(r"[0-9.]+", text)
        fix = f"{digits[0] if digits else text}m would be thousandths of a core; write the cores of one node."
        yield report("cpu-amount", path, f"{text} means {number:,f} cores of each node", fix)


def _check_name(path: str, name: str) -> Iterator[Finding]:
    if name in _NATIVE or name.startswith("hugepages-"):
        return
    what = f"'{name}' is not the name of an extended resource"
    if not _RESOURCE.fullmatch(name):
        fix = "Write DOMAIN/NAME as `kubectl describe node` lists it under Allocatable, such as nvidia.com/gpu."
        yield error("extended-resource-name", path, what, fix)
    elif name.partition("/")[0] == "kubernetes.io" or name.partition("/")[0].endswith(".kubernetes.io"):
        fix = "Write the device plugin's own DOMAIN/NAME."
        yield error("extended-resource-name", path, f"{what}: kubernetes.io is reserved", fix)


def _check_pairs(path: str, asked: dict[str, Any]) -> Iterator[Finding]:
    requests, limits = asked.get("requests") or {}, asked.get("limits") or {}
    for name in {**requests, **limits}:
        request, limit = amount(requests.get(name, "")), amount(limits.get(name, ""))
        if name not in _NATIVE:
            if name not in limits or (request is not None and limit is not None and request != limit):
                what = f"{name}: request {requests.get(name)}, limit {limits.get(name, 'none')}"
                fix = "Set both to the same number (cluster.extended_resources, cluster.gpus_per_node do)."
                yield error("extended-resource-amount", f"{path}.limits", what, fix)
        elif request is not None and limit is not None and request > limit:
            what = f"the request of {name} ({requests[name]}) is above its limit ({limits[name]})"
            yield error("request-above-limit", f"{path}.requests.{name}", what, "Raise the limit, or remove it.")


def _check_missing(subject: Subject, pod: Pod) -> Iterator[Finding]:
    if not subject.is_kubernetes and subject.target != "slurm":
        return
    _, container = pod.trainer
    asked = container.get("resources") or {}
    names = {*(asked.get("requests") or {}), *(asked.get("limits") or {})}
    if "memory" not in names:
        what = "no memory is requested: the pod may be placed where there is none, and is evicted first"
        fix = "Set cluster.memory." if subject.job.script else "Set cluster.memory (`shardtune plan` says how much)."
        yield warning("missing-memory", "cluster.memory", what, fix)
    if "cpu" not in names:
        what = "no CPU is requested: data loading gets what others leave"
        usual = "; 8 to 16 cores per GPU are usual" if subject.has_gpus else ""
        yield warning("missing-cpu", "cluster.cpu", what, f"Set cluster.cpu{usual}.")


def _check_shared_memory(subject: Subject, pod: Pod) -> Iterator[Finding]:
    path, container = pod.trainer
    mounts = {mount.get("mountPath"): mount.get("name") for mount in container.get("volumeMounts") or ()}
    volumes = {volume.get("name"): volume for volume in pod.spec.get("volumes") or ()}
    empty = (volumes.get(mounts.get("/dev/shm")) or {}).get("emptyDir") or {}
    if empty.get("medium") != "Memory":
        users = "NCCL and data workers" if subject.has_gpus else "data workers"
        what = f"/dev/shm is not a tmpfs of its own: the container has 64 MiB, too little for {users}"
        yield warning("shm-size", f"{path}.volumeMounts", what, "Leave the volume `shm` as it is rendered.")
        return
    written = empty.get("sizeLimit")
    shared = amount(written or "")
    limits = (container.get("resources") or {}).get("limits") or {}
    limit = amount(limits.get("memory", ""))
    if shared is not None and limit is not None and shared > limit >= _GIB:  # less is another rule's
        what = f"/dev/shm ({written}) is larger than the memory limit ({limits['memory']}), which it counts against"
        fix = "Set cluster.shared_memory: auto (what the plan needs), or raise cluster.memory."
        yield error("shm-size", "cluster.shared_memory", what, fix)


def _check_gpus(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    gpus, nproc = settings.gpus_per_node, subject.job.nproc
    twice = settings.extended_resources.get(settings.gpu_resource)
    if twice is not None and gpus and amount(twice) != gpus:
        what = f"{settings.gpu_resource} is {twice} in extended_resources, and gpus_per_node is {gpus}"
        yield error("gpu-count", f"cluster.extended_resources.{settings.gpu_resource}", what, "Remove the first.")
    elif not gpus and twice is None:
        on_cpu = subject.run_values.get("parallel.device") == "cpu"
        report = notice if on_cpu else warning
        fix = "Set cluster.gpus_per_node." if not on_cpu else "Nothing, for a job without GPUs (parallel.device: cpu)."
        yield report("gpu-count", "cluster.gpus_per_node", "no GPUs are requested", fix)
    elif gpus and nproc > gpus:
        what = f"parallel.nproc is {nproc}, but a node has {count(gpus, 'GPU')}"
        yield error("gpu-count", "cluster.gpus_per_node", what, "Set parallel.nproc: auto, or more GPUs.")
