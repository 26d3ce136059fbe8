"""Is it the same run on all nodes? Each node publishes its packages and settings; differences are listed by name."""

from __future__ import annotations

import hashlib
import json
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig

STORE_VARIABLE = "SHARDTUNE_STORE_PREFIX"  # of the ranks' keys in their store; each attempt has its own
_PACKAGES = ("shardtune", "torch", "transformers", "peft", "accelerate")
# What may differ between nodes: the number of processes, and paths on its own disk.
_LOCAL_SETTINGS = ("parallel.nproc", "parallel.accelerate_config")


@dataclass(frozen=True)
class NodeFacts:
    """What one node publishes. `settings` are digests by key: enough to name what differs, without exposing secrets."""

    node: int
    nnodes: int
    nproc: int
    host: str = field(default_factory=socket.gethostname)
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def digests(config: RunConfig) -> dict[str, str]:
    """A short digest of every setting that all nodes must share, by its dotted key."""
    flat = {
        f"{section}.{key}": value
        for section, values in config.model_dump(mode="json").items()
        if section != "cluster"
        for key, value in values.items()
    }
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
        for key, value in flat.items()
        if key not in _LOCAL_SETTINGS
    }


def differences(all_facts: Sequence[NodeFacts], called: str = "node") -> list[str]:
    """How nodes differ from node 0, a line each; empty when they may train together."""
    first, lines = all_facts[0], []
    for other in all_facts[1:]:
        who = f"{called} {other.node} ({other.host})"
        for name in sorted({*first.versions, *other.versions}):
            mine, its = first.versions.get(name, "missing"), other.versions.get(name, "missing")
            if mine != its:
                lines.append(f"{name} is {its} on {who} and {mine} on {called} 0 ({first.host})")
        changed = sorted(
            key for key in {*first.settings, *other.settings} if first.settings.get(key) != other.settings.get(key)
        )
        if changed:
            lines.append(f"the configs of {who} and {called} 0 ({first.host}) differ in {', '.join(changed)}")
    return lines
