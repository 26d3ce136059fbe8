"""Machines for the doctor's checks: a folder that stands for `/`, a fake NVML, and packages that are files in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fake_nvml import Card, FakeNvml

from shardtune.config.schema import RunConfig
from shardtune.doctor.finding import Finding
from shardtune.doctor.job import Job
from shardtune.doctor.system import Space, System
from shardtune.plan.host import HostMemory

MOUNTS = "/dev/sda1 / ext4 rw 0 0\nserver:/data /data nfs4 rw 0 0\ntmpfs /scratch tmpfs rw 0 0\noverlay /layer overlay rw 0 0\n"
LARGE, ANY_RUN = Space(1 << 40, 1 << 40), Job()
ROOT = "Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n"
USER = "Uid:\t2000\t2000\t2000\t2000\nCapEff:\t0000000000000000\n"


def limits(memlock: str) -> str:
    return f"Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {memlock}              {memlock}              bytes\n"


def machine(
    root: Path, files: dict[str, str] | None = None, *, cards: list[Card] | None = None,
    environ: dict[str, str] | None = None, versions: dict[str, str] | None = None, space: Space = LARGE,
    ipv4: dict[str, str] | None = None, **more: Any,
) -> System:  # fmt: skip
    """A machine with these files; `versions` are its packages."""
    usual = {"proc/mounts": MOUNTS, "proc/self/status": ROOT, "proc/self/limits": limits("unlimited"), "dev/shm/x": ""}
    for name, text in {**usual, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    packages = versions or {}
    folders = {
        name: root / "site" / name
        for name in ("torch", "torchvision", "transformers", "nvidia")
        if (root / "site" / name).is_dir()
    }
    return System(
        root=root, environ=environ or {}, nvml=FakeNvml(cards), version=packages.get, folder=folders.get,
        space=lambda path: space, ipv4=(ipv4 or {}).get, **more,
    )  # fmt: skip


def needs(per_node: int = 0, shm: int = 0, checkpoint: int = 0, disk: int = 0) -> HostMemory:
    return HostMemory(0, 0, 0, per_node, shm, checkpoint, disk)


def config(**sections: dict[str, Any]) -> RunConfig:
    usual = {"model": {"model_name_or_path": "gpt2"}, "data": {"dataset_name_or_path": "rows.jsonl"}}
    return RunConfig.model_validate({**usual, **sections})


def found(
    check: Callable[[System, Job], Iterable[Finding]], system: System, job: Job = ANY_RUN
) -> dict[str, tuple[str, str]]:
    """By check: the worst verdict and, of that, evidence and fix together."""
    answers = sorted(check(system, job), key=lambda finding: ["ok", "warn", "fail"].index(finding.verdict))
    for finding in answers:
        assert finding.verdict == "ok" or finding.fix, finding
    return {finding.check: (finding.verdict, f"{finding.evidence} → {finding.fix}") for finding in answers}
