"""What does `shardtune env` print? The long form of the machine's facts, for 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardtune.observe.hardware_summary import concerns
from shardtune.terminal import count, say, size

Facts = Mapping[str, Any]


def show_hardware(console: Console, facts: Facts) -> None:
    """Print everything: the host, its GPUs and their interconnect, networks, libraries, variables, warnings."""
    for label, text in _machine(facts):
        say(console, label, text)
    if facts.get("gpus"):
        console.print(_cards(facts["gpus"]))
        for line in _links(facts["gpus"]):
            say(console, "nvlink", line)
        if "topology" in facts:
            console.print(_matrix(facts["topology"], [gpu["index"] for gpu in facts["gpus"]]))
    for label, text in _software(facts):
        say(console, label, text)
    for concern in concerns(facts):
        say(console, "warning", concern, "yellow")


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "host", f"{facts['host']}, {facts['platform']}"
    cpu, memory = facts.get("cpu", {}), facts.get("memory", {})
    words = [str(cpu[name]) for name in ("model",) if name in cpu]
    words += [count(cpu[name], word) for name, word in _CPU_WORDS.items() if name in cpu]
    if "usable" in cpu and cpu["usable"] < cpu.get("threads", 0):
        words.append(f"{cpu['usable']} usable by this process")
    words += [f"limited to {cpu['limit']:g} by the cgroup"] if "limit" in cpu else []
    if words:
        yield "cpu", ", ".join(words)
    if "total" in memory:
        words = [size(memory["total"])]
        words += [f"{size(memory['available'])} available"] if "available" in memory else []
        words += [f"limited to {size(memory['limit'])} by the cgroup"] if "limit" in memory else []
        words += [f"{size(memory['used'])} of that used"] if "used" in memory else []
        yield "memory", ", ".join(words)
    for label, name in (("/dev/shm", "shm"), ("disk", "disk")):
        if space := facts.get(name):
            where = f" ({space['path']})" if name == "disk" else ""
            yield label, f"{size(space['total'])}, {size(space['free'])} free{where}"
    for interface in facts.get("network", []):
        words = [str(interface["name"]), str(interface.get("state", ""))]
        words += [f"{interface['megabits'] / 1000:g} Gb/s"] if "megabits" in interface else []
        words += [f"MTU {interface['mtu']}"] if "mtu" in interface else []
        yield "network", ", ".join(filter(None, words))
    for port in facts.get("rdma", []):
        known = [port[name] for name in ("state", "link_layer", "rate") if name in port]
        yield "rdma", ", ".join([f"{port['device']} port {port['port']}", *known])
    if not facts.get("gpus"):
        yield "gpus", f"none ({facts.get('no_gpu', 'none is reachable')})"
    elif "driver" in facts:
        driver = facts.get("cuda", {}).get("driver")
        yield "driver", f"{facts['driver']}" + (f", up to CUDA {driver}" if driver else "")


_CPU_WORDS = {"sockets": "socket", "cores": "core", "threads": "thread"}


def _cards(gpus: list[Facts]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("GPU", justify="right")
    table.add_column("name", overflow="fold")
    for heading in ("memory", "ECC", "SM MHz", "mem MHz", "watts", "PCIe"):
        table.add_column(heading, justify="right")
    unusual = any(map(_unusual, gpus))
    if unusual:
        table.add_column("")
    for gpu in gpus:
        clocks, pcie = gpu.get("clocks", {}), gpu.get("pcie", {})
        table.add_row(
            str(gpu["index"]),
            escape(str(gpu.get("name", ""))),
            f"{gpu['memory'] / 2**30:.0f} GiB" if "memory" in gpu else "",
            _ecc(gpu.get("ecc", {})),
            _now_of_most(clocks.get("sm_mhz"), clocks.get("sm_max_mhz")),
            _now_of_most(clocks.get("memory_mhz"), clocks.get("memory_max_mhz")),
            f"{gpu['power_limit_watts']:.0f}" if "power_limit_watts" in gpu else "",
            _pcie(pcie),
            *([_unusual(gpu)] if unusual else []),
        )
    return table


def _unusual(gpu: Facts) -> str:
    words = ["MIG"] if gpu.get("mig") else []
    words += ["persistence mode off"] if gpu.get("persistence") is False else []
    return ", ".join(words)


def _ecc(ecc: Facts) -> str:
    if not ecc:
        return ""
    errors = ecc.get("uncorrected")
    return ("on" if ecc["enabled"] else "off") + (f", {count(errors, 'error')}" if errors else "")


def _pcie(pcie: Facts) -> str:
    """Generation × lanes: `5×16`, or `1×16/5×16` where it could do more."""
    if not pcie:
        return ""
    now = f"{pcie.get('generation', '?')}×{pcie.get('width', '?')}"
    most = f"{pcie.get('max_generation', '?')}×{pcie.get('max_width', '?')}"
    return now if now == most else f"{now}/{most}"


def _now_of_most(now: int | None, most: int | None) -> str:
    return "/".join(str(value) for value in dict.fromkeys((now, most)) if value is not None)


def _links(gpus: list[Facts]) -> Iterator[str]:
    """A line for each range of identical links; GPUs with the same links share their lines."""
    for lines, cards in groupby(gpus, key=_links_of):
        numbers = [card["index"] for card in cards]
        for line in lines:
            yield f"{_span('GPU', numbers)} {line}"


def _links_of(gpu: Facts) -> tuple[str, ...]:
    stretches = groupby(gpu.get("nvlink", []), key=_link_words)
    return tuple(f"{_span('link', [link['link'] for link in links])} {words}" for words, links in stretches)


def _span(word: str, numbers: list[int]) -> str:
    return f"{word}s {numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else f"{word} {numbers[0]}"


def _link_words(link: Facts) -> str:
    if not link["active"]:
        return "down"
    speed = link.get("megabytes_per_second")
    words = [
        "up",
        f"version {link['version']}" if "version" in link else "",
        f"{speed / 1000:.1f} GB/s each way" if speed else "",
        f"to {link['peer']}" if "peer" in link else "",
    ]
    return ", ".join(filter(None, words))


def _matrix(topology: list[list[str]], indices: list[int]) -> Table:
    table = Table(
        "", *(f"GPU {index}" for index in indices), box=None, padding=(0, 2, 0, 0), header_style="bold",
        caption="NV18: 18 NVLinks. Otherwise the path: PIX one PCIe switch, PXB several switches, PHB a host bridge, "
        "NODE within a NUMA node, SYS between sockets.", caption_justify="left",
    )  # fmt: skip
    for index, row in zip(indices, topology, strict=True):
        table.add_row(f"GPU {index}", *row)
    return table


def _software(facts: Facts) -> Iterator[tuple[str, str]]:
    cuda = facts.get("cuda", {}).get("torch")
    if "torch" in facts["packages"]:
        yield "torch", f"built for CUDA {cuda}" if cuda else "built without CUDA"
    if "nccl" in facts:
        yield "nccl", str(facts["nccl"])
    versions = (f"{name} {version}" for name, version in facts["packages"].items())
    yield "software", f"Python {facts['python']}, {', '.join(versions)}"
    for name, value in facts.get("variables", {}).items():
        yield "variable", f"{name}={value}"
