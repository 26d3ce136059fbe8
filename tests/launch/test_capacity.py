"""More processes than a machine can hold are refused before one of them is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Command
from toys import toy_config

from shardtune.errors import UserInputError
from shardtune.launch.capacity import LEAST_BYTES, check_capacity
from shardtune.launch.host_memory import free_memory

PLENTY = 1 << 50


def test_as_many_processes_as_fit_are_not_questioned() -> None:
    check_capacity(8, 2, free=8 * LEAST_BYTES)
    check_capacity(64, None, free=PLENTY)  # one per GPU: cores are not what they compute on


def test_too_little_memory_is_refused_with_the_number_that_fits() -> None:
    with pytest.raises(UserInputError) as caught:
        check_capacity(200, 64, free=24 * 10**9)
    assert caught.value.exit_code == 2
    assert "200 processes" in caught.value.what
    assert "73.4 GB of memory" in caught.value.why and "24.0 GB are available" in caught.value.why
    assert f"to {24 * 10**9 // LEAST_BYTES} or less" in caught.value.fix and "--force" in caught.value.fix


def test_too_few_cores_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(UserInputError) as caught:
        check_capacity(9, 2, free=PLENTY)
    assert "share 2 CPU cores" in caught.value.why
    assert "to 8 or less" in caught.value.fix


def test_force_goes_on_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    check_capacity(9, 2, force=True, free=PLENTY)
    said = capsys.readouterr().err
    assert said.startswith("warning: This machine cannot run 9 processes.") and "--force" in said


def test_ten_thousand_processes_are_refused_on_any_machine_and_nothing_is_started(
    tmp_path: Path, toy_model: Path, toy_data: Path, shardtune: Command
) -> None:
    # Whatever memory and cores this machine has.
    config = toy_config(tmp_path, toy_model, toy_data)
    result = shardtune("train", config, "--nproc", "10000")
    assert result.returncode == 2, result.stderr
    assert "cannot run 10000 processes" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


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


def test_the_limit_is_read_from_version_1_of_cgroups_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n0::/\n")
    cgroup(
        tmp_path / "cgroups" / "memory" / "job",
        memory_limit_in_bytes="5000\n", memory_usage_in_bytes="4000\n", memory_stat="total_inactive_file 500\n",
    )  # fmt: skip
    assert free_memory(tmp_path / "cgroups", own, tmp_path / "nothing there") == 1500
