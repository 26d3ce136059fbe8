"""What do all reports and links say together? Which node differs, whose clock is wrong, which link is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardtune.doctor.finding import Finding, NodeReport, fail, ok, warn
from shardtune.doctor.system import System
from shardtune.terminal import size

_SKEW_SECONDS = 2.0
_SLOW_SHARE = 0.5  # of the fastest link between nodes


def differences(reports: Sequence[NodeReport]) -> list[Finding]:
    """A finding for each fact that is not the same everywhere; it names the nodes that differ from most others."""
    found = []
    for name in sorted({name for report in reports for name in report.facts}):
        groups: dict[str, list[NodeReport]] = {}
        for report in reports:
            groups.setdefault(report.facts.get(name, "not set"), []).append(report)
        if len(groups) > 1:
            found.append(_difference(name, groups))
    return found


def _difference(name: str, groups: dict[str, list[NodeReport]]) -> Finding:
    kind, _, rest = name.partition(" ")
    usual = max(groups, key=lambda value: (len(groups[value]), -groups[value][0].node))  # of two halves, node 0's
    nodes = ", ".join(str(report.node) for report in groups[usual])
    odd = [
        f"{'another value' if kind == 'setting' else value} on node {report.node} ({report.host})"
        for value, members in groups.items()
        if value != usual
        for report in members
    ]
    what = rest if kind in ("package", "setting", "variable") else name
    text = f"{what} is {', '.join(odd)}, and {'the same' if kind == 'setting' else usual} on node {nodes}"
    if kind in ("package", "setting"):  # `train` refuses these
        return fail("differences", text, "Use one image and one config file on all nodes.")
    return warn("differences", text, "Make the nodes alike, unless this is meant.")


def clock_skew(reports: Sequence[NodeReport], skews: Mapping[int, tuple[float, float]]) -> list[Finding]:
    """`skews`: bounds of each clock's lead over node 0's. Only what is certain is reported."""
    found, largest = [], 0.0
    for node, (low, high) in skews.items():
        certain = low if low > 0 else min(high, 0.0)
        largest = max(largest, abs(certain))
        if abs(certain) > _SKEW_SECONDS:
            who = f"node {node} ({reports[node].host})"
            how = f"{abs(certain):.1f} s {'ahead of' if certain > 0 else 'behind'} node 0's"
            fix = "Run NTP or chrony on the hosts: logs and leases are compared by time."
            found.append(warn("clocks", f"the clock of {who} is {how}", fix))
    if skews and not found:
        found.append(ok("clocks", f"no clock is further than {max(largest, 0.1):.1f} s from node 0's"))
    return found


def judge_links(system: System, links: Mapping[str, Any] | None) -> list[Finding]:
    """What the measured links and transports mean."""
    if links is None:
        return []
    via = links["transports"]
    shown = "; ".join(f"{place}: {', '.join(kinds)}" for place, kinds in via.items()) or "TCP (gloo)"
    found = [ok("links", f"{len(links['links'])} timed over {links['backend']}, {shown}")]
    if system.rdma_devices and any(kind.startswith("NET/Socket") for kind in via.get("between nodes", [])):
        found.append(
            warn("links.transport", "NCCL uses TCP between nodes (NET/Socket), although there are RDMA devices",
                 "See memlock, rdma and NCCL_IB_HCA above; NCCL_NET=IB turns this fallback into an error.")
        )  # fmt: skip
    linked = any(card.get("nvlink") for card in system.visible_gpus)
    if linked and any(kind.startswith("SHM") for kind in via.get("within a node", [])):
        fix = "Unset NCCL_P2P_DISABLE, and check gpu.peer access."
        found.append(warn("links.transport", "NCCL copies over host memory (SHM) between GPUs that have NVLink", fix))
    bad = [line for line in links["diagnostics"] if not line.startswith("[OK]")]
    if bad:
        found.append(warn("nccl diagnostics", "; ".join(bad), "See NCCL's troubleshooting guide on diagnostics."))
    elif links["diagnostics"]:
        found.append(ok("nccl diagnostics", "; ".join(links["diagnostics"])))
    return found + _slow_links(links["links"])


def _slow_links(links: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Links between nodes that are much slower than the fastest, and the node they have in common."""
    between = {link["link"]: link["all_reduce"] for link in links if "–" in link["link"]}
    slow = [name for name, speed in between.items() if speed < _SLOW_SHARE * max(between.values())]
    if not slow:
        return []
    common = set.intersection(*(set(name.split(" – ")) for name in slow))
    whose = f"; all of them lead to {', '.join(sorted(common))}" if common else ""
    speeds = ", ".join(f"{name} {size(speed)}/s" for name, speed in between.items())
    evidence = f"slower than half of the fastest: {', '.join(slow)}{whose} ({speeds})"
    return [warn("links.speed", evidence, "Check that node's network interfaces, cables and switch ports.")]
