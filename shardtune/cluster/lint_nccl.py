"""Do the variables of NCCL, CUDA and the launchers do what was meant? And can RDMA work at all?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint_finding import Finding, Rule, error, notice, warning
from shardtune.cluster.lint_security import effective_uid
from shardtune.cluster.nccl_names import only_in, releases, unknown_names
from shardtune.launch.process_role import NODES_VARIABLE

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject, Variable

RULES = (
    Rule(
        "nccl-unknown",
        "warning",
        "`NCCL_*` and `TORCH_*` variables that no release of NCCL or torch in the table reads (`NCCL_TIMEOUT`), "
        "or only some of them (a notice).",
        "They do nothing, silently.",
    ),
    Rule(
        "nccl-no-effect",
        "warning",
        "`NCCL_SOCKET_NTHREADS`, `NCCL_NSOCKS_PERTHREAD` with RDMA (they are for TCP); "
        "`NCCL_IB_SPLIT_DATA_ON_QPS` without more than one queue pair; `NCCL_IB_*` without RDMA.",
        "They do nothing.",
    ),
    Rule(
        "nccl-default",
        "notice",
        "A variable whose value is NCCL's default (`NCCL_IB_DISABLE=0`).",
        "It does nothing.",
    ),
    Rule(
        "nccl-tcp",
        "error",
        "`NCCL_IB_DISABLE=1` or `NCCL_NET=Socket` where RDMA was asked for.",
        "The run uses TCP, many times slower.",
    ),
    Rule(
        "nccl-interface",
        "warning",
        "`NCCL_SOCKET_IFNAME` with the name of an InfiniBand device, or with `eth0`.",
        "It names the IP interface for NCCL's bootstrap; `NCCL_IB_HCA` names RDMA devices. Where a node has no "
        "such interface, the run does not start.",
    ),
    Rule(
        "visible-devices",
        "error",
        "`CUDA_VISIBLE_DEVICES` or `NVIDIA_VISIBLE_DEVICES`.",
        "The device plugin says which GPUs the container has; `0` leaves all processes one GPU.",
    ),
    Rule(
        "two-allocators",
        "error",
        "`PYTORCH_ALLOC_CONF` and its old name `PYTORCH_CUDA_ALLOC_CONF`.",
        "Only one of them is read.",
    ),
    Rule(
        "reserved-variable",
        "error",
        "Variables of the launcher or the controller: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `PET_*`,"
        " `SHARDTUNE_NODES`, ….",
        "Every pod would believe to be the same one.",
    ),
    Rule(
        "rdma-without-nic",
        "error",
        "RDMA without a NIC: no extended resource, no hostNetwork, not privileged (a warning with "
        "`cluster.networks`, which may bring it).",
        "The pod has no RDMA device, and NCCL fails.",
    ),
    Rule(
        "rdma-memlock",
        "warning",
        "RDMA for a user other than root.",
        "RDMA needs locked memory, and the limit comes from the container runtime.",
    ),
    Rule(
        "nic-without-rdma",
        "warning",
        "A NIC's resource with `rdma: none`.",
        "NCCL uses it if it can, and TCP without a word if it cannot.",
    ),
)

# As NCCL's recent source has them, not compared release by release; what depends on the machine (BUFFSIZE) is left out.
_DEFAULTS = {
    "NCCL_IB_DISABLE": "0", "NCCL_IB_QPS_PER_CONNECTION": "1", "NCCL_IB_SPLIT_DATA_ON_QPS": "0",
    "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_IB_TIMEOUT": "20", "NCCL_IB_RETRY_CNT": "7",
    "NCCL_CROSS_NIC": "2",
}  # fmt: skip
_TCP_ONLY = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_RESERVED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "JOB_COMPLETION_INDEX", NODES_VARIABLE,
}  # fmt: skip
_RDMA_DEVICE = re.compile(r"[=^]?(mlx\d|ib\d|ibp|bnxt_re|irdma|rocep)")
_NIC = re.compile(r"rdma|mellanox|mlnx|roce|infiniband|sriov|\bhca|\bib\b|nics?\b|\befa\b", re.IGNORECASE)
_TRUE = ("1", "true", "yes")


def check_nccl(subject: Subject) -> Iterator[Finding]:
    unknown = unknown_names(variable.name for variable in subject.variables)
    yield from _check_known(subject, unknown)
    for variable in (one for one in subject.variables if one.name not in unknown):
        yield from _check_variable(subject, variable)
    yield from _check_allocators(subject)
    yield from _check_rdma(subject)


def _check_known(subject: Subject, unknown: Mapping[str, str]) -> Iterator[Finding]:
    paths = {variable.name: variable.path for variable in subject.variables}
    for name, advice in unknown.items():
        library = "nccl" if name.startswith("NCCL_") else "torch"
        known = releases(library)
        spoken = "NCCL" if library == "nccl" else library
        what = f"{name} is read by none of {spoken} {known[0]} to {known[-1]}"
        yield warning("nccl-unknown", paths[name], what, advice)
    for name, path in paths.items():
        if some := only_in(name):
            fix = "Keep it if the image has one of them; `shardtune doctor` in the pod tells."
            yield notice("nccl-unknown", path, f"{name} is read by {', '.join(some)} only", fix)


def _check_variable(subject: Subject, variable: Variable) -> Iterator[Finding]:
    name, value, rdma = variable.name, variable.value or "", subject.settings.rdma != "none"
    if name in _DEVICES:
        what = f"{name} is set: the device plugin says which GPUs a container has"
        yield error("visible-devices", variable.path, what, "Remove it; cluster.gpus_per_node is the number of GPUs.")
    elif name in _RESERVED or name.startswith("PET_"):
        what = f"{name} is set by the launcher or the controller, differently for each pod or process"
        yield error("reserved-variable", variable.path, what, "Remove it; cluster.nodes and gpus_per_node say it all.")
    elif name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        yield from _check_interface(variable)
    elif rdma and (
        (name == "NCCL_IB_DISABLE" and value in _TRUE) or (name == "NCCL_NET" and value.lower() == "socket")
    ):
        what = f"{name}={value} turns RDMA off, but cluster.rdma is {subject.settings.rdma}"
        yield error("nccl-tcp", variable.path, what, "Remove it, or set cluster.rdma: none.")
    elif name in _TCP_ONLY and rdma:
        what = f"{name} is for TCP; with RDMA it does nothing"
        yield warning("nccl-no-effect", variable.path, what, "Remove it.")
    elif name == "NCCL_IB_SPLIT_DATA_ON_QPS" and value != "0" and not _several_queue_pairs(subject):
        what = f"{name} needs NCCL_IB_QPS_PER_CONNECTION above 1"
        yield warning("nccl-no-effect", variable.path, what, "Remove it, or set the other.")
    elif name.startswith("NCCL_IB_") and name != "NCCL_IB_DISABLE" and not (rdma or _rdma_possible(subject)):
        what = f"{name} is for RDMA, and the pod has no RDMA device"
        yield warning("nccl-no-effect", variable.path, what, "Remove it, or set cluster.rdma and the NIC's resource.")
    elif variable.value is not None and _DEFAULTS.get(name) == value:
        yield notice("nccl-default", variable.path, f"{name}={value} is NCCL's default", "Remove it.")


def _rdma_possible(subject: Subject) -> bool:
    """Whether a device may be in the container although nobody asked for RDMA."""
    pod = subject.pods[0]
    _, container = pod.trainer
    devices = _other_resources(subject, container) or subject.settings.networks or pod.spec.get("hostNetwork")
    return not subject.is_kubernetes or bool(devices or (container.get("securityContext") or {}).get("privileged"))


def _other_resources(subject: Subject, container: dict[str, Any]) -> list[str]:
    """Extended resources beside the GPUs."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return [name for name in limits if "/" in name and name != subject.settings.gpu_resource]


def _several_queue_pairs(subject: Subject) -> bool:
    value = subject.value_of("NCCL_IB_QPS_PER_CONNECTION") or "1"
    return value.isdigit() and int(value) > 1


def _check_interface(variable: Variable) -> Iterator[Finding]:
    name, value = variable.name, variable.value or ""
    if _RDMA_DEVICE.match(value) and variable.name.startswith("NCCL"):
        what = f"{name}={value}: it chooses the IP interface for NCCL's bootstrap and TCP, not the InfiniBand device"
        fix = "Remove it. cluster.rdma asks for RDMA; NCCL_IB_HCA chooses between several devices."
        yield warning("nccl-interface", variable.path, what, fix)
    elif "eth0" in value.split(","):
        what = f"{name}={value}: a node or pod without an interface of that name does not start"
        fix = f"Remove it: NCCL finds the interface. To exclude some, write {name}=^lo,docker."
        yield warning("nccl-interface", variable.path, what, fix)


def _check_allocators(subject: Subject) -> Iterator[Finding]:
    paths = {variable.name: variable.path for variable in subject.variables}
    if all(name in paths for name in _ALLOCATORS):
        what = f"{_ALLOCATORS[0]} and {_ALLOCATORS[1]}, its old name, are both set"
        yield error("two-allocators", paths[_ALLOCATORS[1]], what, f"Keep {_ALLOCATORS[0]}.")


def _check_rdma(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    for pod in subject.pods:
        _, container = pod.trainer
        others = _other_resources(subject, container)
        nics = [name for name in others if _NIC.search(name)]
        if settings.rdma == "none":
            if nics:
                what = f"{nics[0]} is requested, but cluster.rdma is none: NCCL may use TCP without a word"
                fix = "Set cluster.rdma: infiniband or roce; a fall-back to TCP is then an error."
                yield warning("nic-without-rdma", "cluster.rdma", what, fix)
            continue
        context = container.get("securityContext") or {}
        if subject.is_kubernetes and not (others or pod.spec.get("hostNetwork") or context.get("privileged")):
            report = warning if settings.networks else error
            what = f"cluster.rdma is {settings.rdma}, but no NIC is requested: the pod has no RDMA device"
            fix = (
                "Add the device plugin's resource to cluster.extended_resources (`kubectl describe node` lists it "
                "under Allocatable), such as rdma/NAME: 1."
            )
            yield report("rdma-without-nic", "cluster.extended_resources", what, fix)
        uid = effective_uid(pod, container)
        if uid != 0 and not context.get("privileged"):
            what = "RDMA needs locked memory, and a user other than root gets the limit of the container runtime"
            fix = (
                "Make sure that it is unlimited (LimitMEMLOCK of the runtime's unit): `shardtune doctor` in the pod "
                "shows it under memlock; cluster.init_doctor runs it first."
            )
            yield warning("rdma-memlock", "cluster.rdma", what, fix)
