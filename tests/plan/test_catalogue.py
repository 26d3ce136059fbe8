"""GPUs and links by name, and a user's file that changes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config.problems import ConfigError
from shardtune.errors import UserInputError
from shardtune.plan.catalogue import find_gpu, find_link, for_cores, load_catalogue, parse_gpus


@pytest.mark.parametrize(
    ("given", "count", "name"),
    [
        ("2xH200", 2, "H200"),
        ("2×H200", 2, "H200"),
        ("H200", 1, "H200"),
        ("8 x h100-80gb", 8, "H100"),
        ("NVIDIA H100 80GB HBM3", 1, "H100"),
        ("NVIDIA H100 PCIe", 1, "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", 1, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 1, "A100-40GB"),
        ("4xNVIDIA GeForce RTX 4090", 4, "RTX-4090"),
        ("4090", 1, "RTX-4090"),
        ("NVIDIA L40S", 1, "L40S"),
        ("NVIDIA B200", 1, "B200"),
    ],
)
def test_gpus_are_known_by_the_drivers_names_and_by_short_ones(given: str, count: int, name: str) -> None:
    found, gpu = parse_gpus(given)
    assert (found, gpu.name) == (count, name)


def test_only_what_was_run_is_called_measured() -> None:
    catalogue = load_catalogue()
    assert [name for name, gpu in catalogue.gpus.items() if gpu.measured] == ["H200", "CPU"]
    assert all("data sheet" in gpu.source for gpu in catalogue.gpus.values() if not gpu.measured)
    assert 139 < find_gpu("H200").memory / 2**30 < 140
    assert find_link("InfiniBand NDR").bandwidth > find_link("100GbE").bandwidth


def test_an_unknown_gpu_is_an_error_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UserInputError, match=r"Known are H200, .*\n.*Did you mean H100"):
        parse_gpus("2xH10")
    for nothing in ("", "0xH200", "2x"):
        with pytest.raises(UserInputError):
            parse_gpus(nothing)


def test_a_users_file_changes_single_values_and_adds_entries(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.yaml"
    link = "{gbs: 5.5, latency_us: 20, shared: true, measured: true, source: iperf}"
    file.write_text(f"gpus:\n  H100:\n    bandwidth_gbs: 3100\n    link: lab\nlinks:\n  lab: {link}\n")
    catalogue = load_catalogue(file)
    changed, shipped = catalogue.gpu("NVIDIA H100 80GB HBM3"), find_gpu("H100")
    assert (changed.bandwidth_gbs, changed.matmul_tflops) == (3100, shipped.matmul_tflops)
    assert str(file) in changed.source and not changed.measured
    assert catalogue.cluster(changed, (4, 4), network="lab").within.gbs == 5.5


def test_the_file_in_the_users_home_is_read_unless_another_one_is_named(tmp_path: Path) -> None:
    own = Path("~/.config/shardtune/catalogue.yaml").expanduser()
    own.parent.mkdir(parents=True)
    own.write_text("gpus: {L40S: {memory_gib: 40}}")
    other = tmp_path / "other.yaml"
    other.write_text("gpus: {L40S: {pcie_gbs: 12}}")
    load_catalogue.cache_clear()
    try:
        assert find_gpu("L40S").memory_gib == 40
        assert load_catalogue(other).gpu("L40S").memory_gib > 40
    finally:
        load_catalogue.cache_clear()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpus: {H200: {matmul_tflop: 3}}", r":1:15  gpus.H200.matmul_tflop\n.*did you mean matmul_tflops"),
        ("gpus: {H200: {bandwidth_gbs: -3}}", r"gpus.H200.bandwidth_gbs\n.*-3: input should be greater than 0"),
        ("gpus: {H200: {bandwidth_gbs: fast}}", r"gpus.H200.bandwidth_gbs\n.*'fast': .*number"),
        ("gpus: {H900: {memory_gib: 1000}}", r"gpus.H900.matmul_tflops\n +is missing"),
        ("gpus: {H200: {link: string}}", r"gpus.H200.link\n.*'string' is no link"),
        ("gpus: {H200: 3}", r"gpus.H200\n.*is no mapping"),
        ("gpu: {H200: {}}", r"gpu\n.*is not `gpus:` or `links:`"),
        ("gpus: [", "not valid YAML"),
        ("3", "no mapping"),
    ],
)
def test_a_wrong_file_is_refused_with_place_and_reason(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_catalogue(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="cannot be read"):
        load_catalogue(tmp_path / "none.yaml")


def test_a_cpu_is_as_fast_as_it_has_cores() -> None:
    one, four = find_gpu("CPU"), for_cores(find_gpu("CPU"), 4)
    assert four.matmul_tflops == 4 * one.matmul_tflops and four.device == "cpu"
