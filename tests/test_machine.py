"""Cores and memory are those this process may use, not those its machine has."""

from __future__ import annotations

import os
from pathlib import Path

from shardtune.machine import free_memory, memory_limit, usable_cores


def test_a_pod_uses_the_cores_it_is_allowed(tmp_path: Path) -> None:
    seen = usable_cores(tmp_path / "nothing there")
    for text, wanted in (("max 100000", seen), ("100000 100000", 1), ("50000 100000", 1), ("9900000 100000", seen)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert usable_cores(tmp_path / "cpu.max") == wanted


def cgroup(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_free_memory_is_a_plausible_number() -> None:
    free = free_memory()
    assert free is not None and 1 << 20 < free < 1 << 50


def test_the_limit_of_a_cgroup_or_of_one_above_it_counts_and_page_cache_does_not(tmp_path: Path) -> None:
    own, meminfo = tmp_path / "own", tmp_path / "meminfo"
    own.write_text("0::/pod/container\n")
    meminfo.write_text("MemTotal: 64 kB\nMemAvailable: 100 kB\n")
    root = tmp_path / "cgroups"
    cgroup(root / "pod" / "container", memory_max="max\n", memory_current="7\n", memory_stat="inactive_file 3\n")
    assert free_memory(root, own, meminfo) == 100 * 1024
    cgroup(root / "pod", memory_max="5000\n", memory_current="3000\n", memory_stat="anon 1\ninactive_file 900\n")
    assert free_memory(root, own, meminfo) == 2900
    assert memory_limit(root, own) == 5000


def test_the_limit_is_read_from_version_1_of_cgroups_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n0::/\n")
    cgroup(
        tmp_path / "cgroups" / "memory" / "job",
        memory_limit_in_bytes="5000\n", memory_usage_in_bytes="4000\n", memory_stat="total_inactive_file 500\n",
    )  # fmt: skip
    assert free_memory(tmp_path / "cgroups", own, tmp_path / "nothing there") == 1500
    assert memory_limit(tmp_path / "cgroups", own) == 5000


def test_without_a_limit_the_memory_is_the_machines(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit(tmp_path / "none", tmp_path / "nothing there") == whole
