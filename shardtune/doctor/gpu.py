"""Are the GPUs healthy, ours alone, and connected? Asked of NVML and the kernel's log; no CUDA context is made."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from shardtune.doctor.finding import Finding, fail, ok, warn
from shardtune.doctor.job import Job
from shardtune.doctor.system import System
from shardtune.terminal import count, size

_SLOWDOWNS = {  # not power capping, which is what a busy GPU does
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "too hot (hardware)",
    "SwThermalSlowdown": "too hot (driver)",
    "HwPowerBrakeSlowdown": "power brake of the server",
}
# Xids that speak of the card or its links, not of a program (13, 31, 43, 45 and others).
_SERIOUS_XIDS = {
    48: "uncorrectable memory error", 63: "memory row remapping", 64: "memory row remapping failed",
    74: "NVLink error", 79: "fallen off the bus", 92: "many corrected memory errors", 94: "contained memory error",
    95: "uncontained memory error", 119: "GSP timeout", 120: "GSP error", 140: "unrecovered memory error",
}  # fmt: skip
_IN_USE = 2 << 30  # bytes beyond what the driver itself holds
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_RESET = "Reset the GPU (nvidia-smi --gpu-reset) or restart the node; replace the card if it happens again."


def check_visible(system: System, job: Job) -> Iterator[Finding]:
    """Are there as many GPUs as processes, and does CUDA_VISIBLE_DEVICES mean what its author thought?"""
    cards, visible = system.gpus.get("gpus", []), system.visible_gpus
    for lost in system.gpus.get("unreachable_gpus", []):
        verdict = warn if "CUDA_VISIBLE_DEVICES" in system.environ or job.device == "cpu" else fail
        yield verdict("gpu.reachable", f"GPU {lost['index']} is not reachable: {lost['error']}", _RESET)
    wanted = system.environ.get("CUDA_VISIBLE_DEVICES")
    if not cards:
        must = job.config is not None and job.config.parallel.device == "cuda"
        reason = f"no GPU: {system.gpus.get('no_gpu', 'NVML reports none')}"
        fix = "Request GPUs for the container (nvidia.com/gpu), and check nvidia-smi in it."
        yield fail("gpu.visible", reason, fix) if must else ok("gpu.visible", reason)
        return
    kinds = Counter(str(card.get("name", "GPU")) for card in visible)
    evidence = " and ".join(f"{number} × {name}" for name, number in kinds.items()) or "no GPU"
    evidence += "" if wanted is None else f" by CUDA_VISIBLE_DEVICES={wanted} (of {len(cards)})"
    entries = [entry for entry in (wanted or "").split(",") if entry.strip()]
    if job.device == "cuda" and len(visible) < job.nproc:
        fix = "Unset CUDA_VISIBLE_DEVICES, or start fewer processes." if wanted is not None else "Request more GPUs."
        yield fail("gpu.visible", f"{count(job.nproc, 'process', 'es')} on this node, but {evidence}", fix)
    elif wanted is not None and (len(set(entries)) < len(entries) or len(visible) < len(entries)):
        yield warn(
            "gpu.visible",
            f"CUDA_VISIBLE_DEVICES={wanted} names a GPU twice or one that is not here; CUDA sees {evidence}",
            f"Use indices below {len(cards)}, each once, or unset it.",
        )
    elif len(kinds) > 1:
        yield warn("gpu.visible", f"{evidence}: the slowest sets the pace", "Use GPUs of one kind.")
    elif wanted is not None and len(visible) < len(cards):
        yield warn("gpu.visible", evidence, "Unset CUDA_VISIBLE_DEVICES to use all GPUs of this container.")
    else:
        yield ok("gpu.visible", evidence)


def check_health(system: System, job: Job) -> Iterator[Finding]:
    """Memory errors, throttling, other processes, lanes; one finding for each trouble of each visible GPU."""
    if not system.visible_gpus:
        return
    nvml = system.nvml_module
    nvml.nvmlInit()
    try:
        found = [finding for card in system.visible_gpus for finding in _health(nvml, card)]
    finally:
        nvml.nvmlShutdown()
    yield from found
    if not any(finding.check == "gpu.memory errors" for finding in found):
        yield ok("gpu.memory errors", "no uncorrected ECC errors, no pending row remapping or page retirement")


def _health(nvml: Any, card: dict[str, Any]) -> Iterator[Finding]:
    index = card["index"]

    def ask(question: str, *args: Any) -> Any:
        """None where this GPU, driver or NVML does not say."""
        function = getattr(nvml, question, None)
        with suppress(nvml.NVMLError):
            return function(handle, *args) if function is not None else None
        return None

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    yield from _memory_errors(nvml, ask, card)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    active = [
        text for name, text in _SLOWDOWNS.items() if (reasons or 0) & getattr(nvml, f"nvmlClocksEventReason{name}")
    ]
    if active:
        celsius = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        degrees = f" at {celsius} °C" if celsius is not None else ""
        yield warn(
            "gpu.throttling", f"GPU {index} is slowed down{degrees}: {', '.join(active)}",
            "Check cooling and power of the node; the slowest GPU sets the pace of all.",
        )  # fmt: skip
    others = [process for process in ask("nvmlDeviceGetComputeRunningProcesses") or [] if process.pid != os.getpid()]
    used = card.get("memory_used", 0)
    if others or used > _IN_USE:
        who = ", ".join(f"process {process.pid}" for process in others) or "processes outside of this container"
        yield warn(
            "gpu.other processes", f"GPU {index}: {size(used)} of {size(card.get('memory', 0))} are in use by {who}",
            "Stop them, or choose other GPUs with CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip
    pcie = card.get("pcie", {})
    if pcie.get("width", 0) < pcie.get("max_width", 0):
        evidence = f"GPU {index} is connected over {pcie['width']} of {pcie['max_width']} PCIe lanes"
        yield warn("gpu.pcie", evidence, "Reseat or replace the card or its riser.")
    if card.get("mig"):
        yield warn("gpu.mig", f"GPU {index} is split into MIG instances, which cannot use NVLink", "Disable MIG.")


def _memory_errors(nvml: Any, ask: Any, card: dict[str, Any]) -> Iterator[Finding]:
    check, index = "gpu.memory errors", card["index"]
    rows = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    if rows is not None and rows[3]:
        yield fail(check, f"GPU {index}: remapping a broken memory row has failed", "Replace the card.")
    elif (rows is not None and rows[2]) or ask("nvmlDeviceGetRetiredPagesPendingStatus"):
        yield warn(check, f"GPU {index} has broken memory that is replaced at its next reset", _RESET)
    counters = (("since the driver was loaded", nvml.NVML_VOLATILE_ECC), ("in its life", nvml.NVML_AGGREGATE_ECC))
    for when, counter in counters:
        errors = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)
        if errors:
            yield warn(check, f"GPU {index}: {count(errors, 'uncorrected ECC error')} {when}", _RESET)
            return


def check_persistence(system: System, job: Job) -> Iterator[Finding]:
    off = [str(card["index"]) for card in system.visible_gpus if card.get("persistence") is False]
    if off:
        yield warn(
            "gpu.persistence", f"persistence mode is off on GPU {', '.join(off)}: every start waits for the driver",
            "nvidia-smi -pm 1 on the host (or nvidia-persistenced).",
        )  # fmt: skip


def check_nvlink(system: System, job: Job) -> Iterator[Finding]:
    cards = [card for card in system.visible_gpus if card.get("nvlink")]
    down = {
        card["index"]: [str(link["link"]) for link in card["nvlink"] if not link["active"]]
        for card in cards
    }  # fmt: skip
    for card in cards:
        dead, links = down[card["index"]], len(card["nvlink"])
        # A lone GPU, or a board without a bridge, has none that are up; that is how it is built.
        if dead and (len(dead) < links or len(system.visible_gpus) > 1):
            yield warn(
                "gpu.nvlink", f"GPU {card['index']}: {len(dead)} of {links} NVLinks are down ({', '.join(dead)})",
                "Check nvidia-smi nvlink --status and, with NVSwitch, that the fabric manager runs on the host.",
            )  # fmt: skip
    if cards and not any(down.values()):
        up = Counter(len(card["nvlink"]) for card in cards)
        yield ok("gpu.nvlink", ", ".join(f"{links} links up on {count(cards, 'GPU')}" for links, cards in up.items()))


def check_xids(system: System, job: Job) -> Iterator[Finding]:
    """Errors that the driver logged since the machine started, where this process may read them."""
    if not system.gpus.get("gpus") and "unreachable_gpus" not in system.gpus:
        return
    text = _kernel_log(system)
    if text is None:
        yield ok("gpu.xid", "not checked: /dev/kmsg may not be read here (look at dmesg on the host)")
        return
    seen = Counter((match[1], int(match[2])) for match in _XID.finditer(text))
    serious = {key: number for key, number in seen.items() if key[1] in _SERIOUS_XIDS}
    for (address, xid), number in serious.items():
        evidence = f"Xid {xid} ({_SERIOUS_XIDS[xid]}), {number} × on the GPU at {address} since the machine started"
        yield warn("gpu.xid", evidence, _RESET)
    if not serious:
        yield ok("gpu.xid", "no Xid of a broken GPU in the kernel's log")


def _kernel_log(system: System) -> str | None:
    """All of it; every read of the device returns one record."""
    try:
        log = os.open(system.path("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records: list[bytes] = []
    try:
        while True:
            try:
                record = os.read(log, 1 << 16)
            except BrokenPipeError:  # overwritten before it was read; the next read goes on with the oldest
                continue
            except OSError:  # EAGAIN: the end of it; EPERM, EINVAL: not for us
                break
            if not record:
                break
            records.append(record)
    finally:
        os.close(log)
    return b"".join(records).decode("utf-8", errors="replace")


def check_peer_access(system: System, job: Job) -> Iterator[Finding]:
    """Copy between every two GPUs and compare the bytes with those of the host. Imports torch; a second or two."""
    if len(system.visible_gpus) < 2 or system.torch_cuda is None:
        return
    import torch

    number = torch.cuda.device_count()
    expected = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)
    wrong, indirect = [], []
    for source in range(number):
        origin = expected.to(f"cuda:{source}")
        for target in range(number):
            if source == target:
                continue
            if not torch.cuda.can_device_access_peer(source, target):
                indirect.append(f"{source}→{target}")
            if not torch.equal(origin.to(f"cuda:{target}").cpu(), expected):
                wrong.append(f"{source}→{target}")
    if wrong:
        yield fail(
            "gpu.peer access", f"copies between GPUs arrive with other bytes: {', '.join(wrong)}",
            "Disable IOMMU/ACS on the host, or set NCCL_P2P_DISABLE=1; until then results are wrong.",
        )  # fmt: skip
    elif indirect:
        yield warn(
            "gpu.peer access", f"no peer access (the bytes are right, over the host): {', '.join(indirect)}",
            "Expected on cards without NVLink or P2P; otherwise check nvidia-smi topo -p2p r.",
        )  # fmt: skip
    else:
        yield ok("gpu.peer access", f"{number * (number - 1)} pairs, 16 MiB each, bytes compared")
