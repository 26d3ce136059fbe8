from __future__ import annotations

from pathlib import Path

import pynvml
import pytest
from doctor.machines import config, found, machine
from fake_nvml import Card, h200s

from shardtune.doctor.gpu import check_health, check_nvlink, check_persistence, check_visible, check_xids
from shardtune.doctor.job import Job


@pytest.mark.parametrize(
    ("card", "check", "verdict", "words"),
    [
        (Card(), "gpu.memory errors", "ok", "no uncorrected ECC errors"),
        (Card(recent_uncorrected=2), "gpu.memory errors", "warn", "GPU 0: 2 uncorrected ECC errors since the driver was loaded"),
        (Card(uncorrected=1), "gpu.memory errors", "warn", "1 uncorrected ECC error in its life"),
        (Card(remapped=(0, 1, 1, 0)), "gpu.memory errors", "warn", "replaced at its next reset → Reset the GPU"),
        (Card(remapped=(0, 1, 0, 1)), "gpu.memory errors", "fail", "remapping a broken memory row has failed → Replace"),
        (Card(slowdown=pynvml.nvmlClocksEventReasonHwThermalSlowdown), "gpu.throttling", "warn", "at 91 °C: too hot"),
        (Card(processes=(4711,), used=9 << 30), "gpu.other processes", "warn", "9 GiB of 140 GiB are in use by process 4711"),
        (Card(used=9 << 30), "gpu.other processes", "warn", "processes outside of this container"),
        (Card(lanes=8), "gpu.pcie", "warn", "8 of 16 PCIe lanes"),
        (Card(mig=1), "gpu.mig", "warn", "MIG"),
    ],
)  # fmt: skip
def test_a_gpu_in_trouble_is_named(tmp_path: Path, card: Card, check: str, verdict: str, words: str) -> None:
    answer = found(check_health, machine(tmp_path, cards=[card]))[check]
    assert answer[0] == verdict and words in answer[1]


def test_a_gpu_that_is_capped_by_its_power_limit_is_fine(tmp_path: Path) -> None:
    card = Card(slowdown=pynvml.nvmlClocksEventReasonSwPowerCap, recent_uncorrected=None, remapped=None)
    assert found(check_health, machine(tmp_path, cards=[card])).keys() == {"gpu.memory errors"}


def test_nvlinks_that_are_down_are_counted_unless_the_card_is_alone(tmp_path: Path) -> None:
    broken = Card(links=["switch"] * 16 + [None, None])
    verdict, text = found(check_nvlink, machine(tmp_path, cards=[Card(), broken]))["gpu.nvlink"]
    assert verdict == "warn" and "GPU 1: 2 of 18 NVLinks are down (16, 17)" in text
    assert found(check_nvlink, machine(tmp_path, cards=[Card(links=[None] * 4)])) == {}
    assert found(check_nvlink, machine(tmp_path, cards=h200s(8)))["gpu.nvlink"] == ("ok", "18 links up on 8 GPUs → ")


@pytest.mark.parametrize(
    ("visible", "cards", "nproc", "verdict", "words"),
    [
        (None, h200s(8), 8, "ok", "8 × NVIDIA H200"),
        ("0", h200s(8), 8, "fail", "8 processes on this node, but 1 × NVIDIA H200 by CUDA_VISIBLE_DEVICES=0 (of 8) → Unset"),
        ("0,1", h200s(8), 2, "warn", "(of 8) → Unset CUDA_VISIBLE_DEVICES to use all"),
        ("0,9", h200s(8), 1, "warn", "one that is not here"),
        ("0,0", h200s(1), 1, "warn", "twice"),
        ("GPU-00000001", h200s(2), 1, "warn", "1 × NVIDIA H200 by"),
        ("", h200s(2), 1, "fail", "no GPU by CUDA_VISIBLE_DEVICES="),
        (None, [Card(), Card(name="NVIDIA L40S")], 2, "warn", "the slowest sets the pace"),
        (None, None, 1, "fail", "NVML Shared Library Not Found → Request GPUs"),
    ],
)  # fmt: skip
def test_cuda_visible_devices_is_compared_with_the_gpus_and_processes(
    tmp_path: Path, visible: str | None, cards: list[Card] | None, nproc: int, verdict: str, words: str
) -> None:
    system = machine(tmp_path, cards=cards, environ={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    answer = found(check_visible, system, Job(config(parallel={"device": "cuda"}), nproc=nproc, device="cuda"))
    assert answer["gpu.visible"][0] == verdict and words in answer["gpu.visible"][1]


def test_a_gpu_that_fell_off_the_bus_fails(tmp_path: Path) -> None:
    answer = found(check_visible, machine(tmp_path, cards=[Card(), Card(lost=True)]), Job(device="cuda"))
    assert answer["gpu.reachable"][0] == "fail" and "GPU 1 is not reachable" in answer["gpu.reachable"][1]


def test_persistence_mode_that_is_off_is_a_warning(tmp_path: Path) -> None:
    verdict, text = found(check_persistence, machine(tmp_path, cards=[Card(), Card(persistence=0)]))["gpu.persistence"]
    assert verdict == "warn" and "GPU 1" in text


def test_xids_of_the_card_are_reported_and_those_of_programs_are_not(tmp_path: Path) -> None:
    log = (
        "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU fault\n"
        + "4,2,2,-;NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n" * 2
    )
    verdict, text = found(check_xids, machine(tmp_path / "a", {"dev/kmsg": log}, cards=[Card()]))["gpu.xid"]
    assert (
        verdict == "warn" and "Xid 79 (fallen off the bus), 2 × on the GPU at 0000:5e:00" in text and "31" not in text
    )
    assert (
        found(check_xids, machine(tmp_path / "b", {"dev/kmsg": log.splitlines()[0]}, cards=[Card()]))["gpu.xid"][0]
        == "ok"
    )
    assert "not checked" in found(check_xids, machine(tmp_path / "c", cards=[Card()]))["gpu.xid"][1]
