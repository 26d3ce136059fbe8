"""Do RDMA and IP interfaces work, and do the settings name ones that exist?"""

from __future__ import annotations

from collections.abc import Iterator

from shardtune.doctor.finding import Finding, fail, ok, warn
from shardtune.doctor.job import Job
from shardtune.doctor.system import System


def check_rdma(system: System, job: Job) -> Iterator[Finding]:
    devices = system.rdma_devices
    if not devices:
        if job.uses_nccl and job.node.nnodes > 1:
            yield ok("rdma", "no RDMA devices (/sys/class/infiniband is empty): NCCL uses TCP between nodes")
        return
    up, down = {}, []
    for device in devices:
        for port in system.names(f"sys/class/infiniband/{device}/ports"):
            place = f"sys/class/infiniband/{device}/ports/{port}"
            state, physical = (system.read(f"{place}/{name}") or "?" for name in ("state", "phys_state"))
            if "ACTIVE" in state:
                up[f"{device}:{port}"] = system.read(f"{place}/rate") or "?"
            else:
                down.append(f"{device}:{port} ({_word(state)}, {_word(physical)})")
    fix = "Check cables, the switch and the subnet manager (ibstat), or name the good ones in NCCL_IB_HCA."
    if down:
        yield warn("rdma", f"RDMA ports are down: {', '.join(down)}; up: {', '.join(up) or 'none'}", fix)
    elif len(set(up.values())) > 1:
        rates = ", ".join(f"{port} {rate}" for port, rate in up.items())
        yield warn("rdma", f"RDMA ports have different rates: {rates}", fix)
    else:
        yield ok("rdma", ", ".join(f"{port} {rate}" for port, rate in up.items()))
    if up and not any(name.startswith("uverbs") for name in system.names("dev/infiniband")):
        yield warn(
            "rdma.access",
            "the kernel has RDMA devices, but /dev/infiniband/uverbs* is not in this container: NCCL uses TCP",
            "Request the RDMA resource of your cluster (rdma/…, openshift.io/…), or docker --device /dev/infiniband.",
        )


def _word(text: str) -> str:
    return text.partition(": ")[2] or text


def matches(setting: str, name: str, port: str = "") -> bool:
    """NCCL's rule for NCCL_SOCKET_IFNAME and NCCL_IB_HCA: prefixes, `=` for whole names, `^` for all but these."""
    exclude, setting = setting.startswith("^"), setting.removeprefix("^")
    exact, setting = setting.startswith("="), setting.removeprefix("=")
    entries = [entry.strip() for entry in setting.split(",") if entry.strip()]

    def fits(entry: str) -> bool:
        entry, _, wanted_port = entry.partition(":")
        return (name == entry if exact else name.startswith(entry)) and (not wanted_port or wanted_port == port)

    return any(map(fits, entries)) != exclude


def check_interfaces(system: System, job: Job) -> Iterator[Finding]:
    """The interfaces that settings name exist, are up, have an address, and lead to the master."""
    names = system.names("sys/class/net")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if not (setting := system.setting(variable)):
            continue
        if variable.startswith("GLOO"):  # whole names only
            missing = [name for name in setting.split(",") if name not in names]
            chosen = [] if missing else setting.split(",")
        else:
            chosen = [name for name in names if matches(setting, name)]
        # A CPU run does not read NCCL's.
        verdict = fail if variable.startswith("GLOO") or job.uses_nccl else warn
        usable = [name for name in chosen if is_up(system, name) and system.addresses(name)]
        fix = (
            f"Correct {variable} (here: {', '.join(names)}), or unset it: the interface to the master is found without."
        )
        if not chosen:
            yield verdict(variable, f"{variable}={setting} names no interface of this machine", fix)
        elif not usable:
            yield verdict(variable, f"{', '.join(chosen)} ({variable}) is down or has no address", fix)
        else:
            yield _leads_to_master(system, job, variable, usable, fix)


def _leads_to_master(system: System, job: Job, variable: str, usable: list[str], fix: str) -> Finding:
    shown = ", ".join(f"{name} ({', '.join(system.addresses(name))})" for name in usable)
    route = system.interface_to(job.node.master_addr) if job.node.nnodes > 1 and job.node.node_rank else None
    if route is not None and route not in usable:
        return warn(variable, f"{variable} chooses {shown}, but the master is reached by {route}", fix)
    return ok(variable, shown)


def is_up(system: System, interface: str) -> bool:
    """`unknown` is what loopback and tunnels say; a flag tells whether they are enabled."""
    state, flags = system.read(f"sys/class/net/{interface}/operstate"), system.read(f"sys/class/net/{interface}/flags")
    return state == "up" or (state == "unknown" and bool(int(flags or "1", 16) & 1))


def check_hca(system: System, job: Job) -> Iterator[Finding]:
    setting, devices = system.setting("NCCL_IB_HCA"), system.rdma_devices
    ports = [(device, port) for device in devices for port in system.names(f"sys/class/infiniband/{device}/ports")]
    if setting and devices and not any(matches(setting, device, port) for device, port in ports):
        fix = f"Correct it (here: {', '.join(devices)}), or unset it to use all."
        yield warn("NCCL_IB_HCA", f"NCCL_IB_HCA={setting} matches no RDMA device: NCCL uses TCP", fix)
    if system.setting("NCCL_NET").upper() == "IB" and job.uses_nccl and job.node.nnodes > 1 and not devices:
        yield fail("NCCL_NET", "NCCL_NET=IB, but there is no RDMA device", "Unset NCCL_NET, or request RDMA devices.")


def check_master_name(system: System, job: Job) -> Iterator[Finding]:
    if job.node.nnodes == 1 or not job.node.master_addr:  # doctor --this-node
        return
    master = job.node.master_addr
    try:
        yield ok("master.dns", f"{master} is {', '.join(system.resolve(master))}")
    except OSError as error:
        # Not a failure yet: a pod's name may come later, and joining asks again.
        yield warn(
            "master.dns", f"the name '{master}' does not resolve to an address ({error.strerror or error})",
            "Check --master-addr, the headless Service of the job, and /etc/resolv.conf.",
        )  # fmt: skip


def mtu_to_master(system: System, job: Job) -> tuple[str, str] | None:
    """The interface that leads to the master, and its MTU."""
    name = system.interface_to(job.node.master_addr) if job.node.nnodes > 1 else None
    mtu = system.read(f"sys/class/net/{name}/mtu") if name else None
    return (name, mtu) if name and mtu else None
