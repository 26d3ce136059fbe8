"""What hardware does a run have? A few lines: this node, how other nodes differ, what is likely to cause problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from shardtune.observe.hardware import describe_hardware
from shardtune.terminal import count, say, size

Facts = Mapping[str, Any]

_SMALL_SHM = 2**30
_TOLERANCE = 0.05  # the memory of two machines of one kind differs by what their kernels reserve


def print_hw_summary(
    console: Console | None = None,
    facts: Facts | None = None,
    others: Mapping[str, Facts] | None = None,
    *,
    workers: int = 0,
    brief: bool = False,
) -> None:
    """Print a few lines: this machine, what differs on the other nodes, what is likely to cause problems.

    Args:
        console: Where to print; standard output by default. A quiet one prints nothing.
        facts: The result of `describe_hardware`; None calls it.
        others: The same for other nodes, by node name.
        workers: Number of data loader processes, which share memory through `/dev/shm`.
        brief: Only differences and problems.
    """
    console = Console() if console is None else console
    facts = describe_hardware() if facts is None else facts
    for label, text in [] if brief else summary_lines(facts):
        say(console, label, text)
    for name, other in (others or {}).items():
        if lines := differences(facts, other):
            say(console, "differs", f"{name}: {'; '.join(lines)}")
    for name, node in {"": facts, **(others or {})}.items():
        for concern in concerns(node, workers=workers):
            text = f"{name}: {concern}" if name else concern
            say(console, "warning", text, "yellow")


def summary_lines(facts: Facts) -> list[tuple[str, str]]:
    """The short form: host, GPUs, network, libraries; a line is left out where nothing is known."""
    lines = [("host", ", ".join([str(facts["host"]), *_host_words(facts)])), ("gpus", gpu_line(facts))]
    if text := network_line(facts):
        lines.append(("network", text))
    packages = facts["packages"]
    names = ["torch", "transformers", "peft", "accelerate"]
    words = [f"{name} {packages[name]}" for name in names if name in packages]
    words += [f"NCCL {facts['nccl']}"] if "nccl" in facts and facts.get("gpus") else []
    lines.append(("software", f"Python {facts['python']}, {', '.join(words)}"))
    return lines


def gpu_line(facts: Facts) -> str:
    """All GPUs in one line; identical ones are counted."""
    if not facts.get("gpus"):
        return f"none ({facts.get('no_gpu', 'none is reachable')})"
    kinds = Counter(_card(gpu) for gpu in facts["gpus"])
    words = [f"{number} × {card}" for card, number in kinds.items()]
    if "driver" in facts:
        words.append(f"driver {facts['driver']}")
    cuda = facts.get("cuda", {})
    if cuda:
        words.append("CUDA " + ", ".join(f"{version} ({of})" for of, version in cuda.items()))
    pairs = {word for row in facts.get("topology", []) for word in row} - {"X"}
    if pairs:
        words.append(f"connected by {' and '.join(sorted(pairs))}")
    if (visible := facts.get("variables", {}).get("CUDA_VISIBLE_DEVICES")) is not None:
        words.append(f"CUDA_VISIBLE_DEVICES={visible}")  # NVML counts all of them
    return ", ".join(words)


def network_line(facts: Facts) -> str:
    """Interfaces that are up and RDMA ports that are active, identical ones counted."""
    words = []
    for interface in facts.get("network", []):
        if interface.get("state") == "up":
            speed = f" {interface['megabits'] / 1000:g} Gb/s" if "megabits" in interface else ""
            words.append(f"{interface['name']}{speed}")
    ports = Counter(
        f"{port.get('link_layer', 'RDMA')} {port.get('rate', '')}".strip()
        for port in facts.get("rdma", [])
        if port.get("state") == "ACTIVE"
    )
    words += [f"{number} × {kind}" for kind, number in ports.items()]
    return ", ".join(words)


def concerns(facts: Facts, *, workers: int = 0) -> list[str]:
    """What is likely to make a run slow or crash it; a sentence each."""
    found = []
    shm = facts.get("shm")
    if workers and shm and shm["total"] < _SMALL_SHM:
        found.append(
            f"/dev/shm has only {size(shm['total'])}, and {count(workers, 'data worker')} pass batches through it: "
            "when it is full, they crash with a bus error. Give the container more (docker --shm-size, or an emptyDir "
            "with medium: Memory), or set train.dataloader_num_workers: 0."
        )
    for card in facts.get("unreachable_gpus", []):
        found.append(f"GPU {card['index']} is not reachable: {card['error']}.")
    for gpu in facts.get("gpus", []):
        found += [f"GPU {gpu['index']} {trouble}" for trouble in _gpu_concerns(gpu)]
    down = [f"{port['device']} port {port['port']}" for port in facts.get("rdma", []) if port.get("state") == "DOWN"]
    if down and len(down) < len(facts["rdma"]):
        found.append(f"Some RDMA ports are down: {', '.join(down)}.")
    return found


def _gpu_concerns(gpu: Facts) -> Iterator[str]:
    if uncorrected := gpu.get("ecc", {}).get("uncorrected"):
        yield f"has {count(uncorrected, 'uncorrectable ECC memory error')}: it may need to be replaced."
    links = gpu.get("nvlink", [])
    dead = [str(link["link"]) for link in links if not link["active"]]
    if dead and len(dead) < len(links):
        yield f"has NVLinks that are down: {', '.join(dead)} (of {len(links)})."
    pcie = gpu.get("pcie", {})
    # Only the width: the generation falls by itself while a card is idle.
    if pcie.get("width", 0) < pcie.get("max_width", 0):
        yield f"is connected over {pcie['width']} of {pcie['max_width']} PCIe lanes."
    if gpu.get("mig"):
        yield "is split into MIG instances, which cannot communicate over NVLink."


def differences(here: Facts, there: Facts) -> list[str]:
    """How another node differs from this one, in what may affect a run; a phrase for each fact."""
    mine, other = _comparable(here), _comparable(there)
    lines = [
        f"{name} {_shown(other.get(name))} instead of {_shown(mine.get(name))}"
        for name in {**mine, **other}
        if not _alike(mine.get(name), other.get(name))
    ]
    a, b = here.get("variables", {}), there.get("variables", {})
    for name in sorted({*a, *b}):
        if not name.startswith("SHARDTUNE_") and a.get(name) != b.get(name):  # ours differ between processes
            lines.append(f"{name}={b[name]}" if name in b else f"{name} is not set (here {a[name]})")
    return lines


def _comparable(facts: Facts) -> dict[str, str | int]:
    """Numbers are bytes, and compared with a tolerance."""
    cpu, memory, cuda = facts.get("cpu", {}), facts.get("memory", {}), facts.get("cuda", {})
    links = Counter(sum(link["active"] for link in gpu.get("nvlink", [])) for gpu in facts.get("gpus", []))
    found = {
        "CPU": cpu.get("model"),
        "CPUs": str(cpu.get("limit", cpu.get("threads", ""))),
        "memory": memory.get("limit", memory.get("total")),
        "/dev/shm": facts.get("shm", {}).get("total"),
        "GPUs": ", ".join(f"{n} × {card}" for card, n in Counter(map(_card, facts.get("gpus", []))).items()) or "none",
        "NVLinks that are up": ", ".join(f"{up} on {count(n, 'GPU')}" for up, n in sorted(links.items()) if up),
        "driver": facts.get("driver"),
        "CUDA of the driver": cuda.get("driver"),
        "CUDA of torch": cuda.get("torch"),
        "NCCL": facts.get("nccl"),
        "network": network_line(facts),
        "Python": facts["python"],
        **facts["packages"],
    }
    return {name: value for name, value in found.items() if value}


def _alike(a: str | int | None, b: str | int | None) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a - b) <= _TOLERANCE * max(a, b)
    return a == b


def _shown(value: str | int | None) -> str:
    return "(none)" if value is None else size(value) if isinstance(value, int) else value


def _host_words(facts: Facts) -> list[str]:
    cpu, memory = facts.get("cpu", {}), facts.get("memory", {})
    words = []
    if "model" in cpu:
        sockets = f"{cpu['sockets']} × " if cpu.get("sockets", 1) > 1 else ""
        words.append(f"{sockets}{cpu['model']}")
    if "threads" in cpu:
        allowed = min(cpu.get("limit", cpu["threads"]), cpu.get("usable", cpu["threads"]))
        of = f"{allowed:g} of " if allowed < cpu["threads"] else ""
        words.append(f"{of}{count(cpu['threads'], 'CPU')}")
    if "total" in memory:
        limit = f"{size(memory['limit'])} of " if "limit" in memory else ""
        words.append(f"{limit}{size(memory['total'])} memory")
    if "disk" in facts:
        words.append(f"{size(facts['disk']['free'])} free for runs")
    return words


def _card(gpu: Facts) -> str:
    memory = f" {gpu['memory'] / 2**30:.0f} GiB" if "memory" in gpu else ""
    ecc = gpu.get("ecc", {}).get("enabled")
    return f"{gpu.get('name', 'GPU')}{memory}" + ("" if ecc is None else f" (ECC {'on' if ecc else 'off'})")
