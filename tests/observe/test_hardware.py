"""What a run says about its machines, and what `shardtune env` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import Card, FakeNvml, h200s
from observe.test_host import machine
from rich.console import Console
from running import Command

from shardtune.observe.hardware import describe_hardware
from shardtune.observe.hardware_page import show_hardware
from shardtune.observe.hardware_summary import concerns, differences, print_hw_summary, summary_lines

RDMA = {
    f"sys/class/infiniband/mlx5_{n}/ports/1/{name}": text
    for n in range(8)
    for name, text in (("state", "4: ACTIVE"), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand"))
}


def big_node(root: Path, cards: list[Card] | None = None, **environ: str) -> dict[str, Any]:
    files = {
        "sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/speed": "100000", "sys/class/net/eth0/mtu": "9000", **RDMA
    }  # fmt: skip
    nvml = FakeNvml(h200s() if cards is None else cards)
    facts = describe_hardware(root, nvml=nvml, root=machine(root, files), environ=environ)
    return {**facts, "host": "gpu-7", "cuda": {"driver": "13.0", "torch": "12.8"}, "nccl": "2.27.7"}


def said(width: int, write: Any) -> str:
    console = Console(width=width, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    write(console)
    return console.export_text()


def test_everything_is_plain_json(tmp_path: Path) -> None:
    facts = big_node(tmp_path)
    assert json.loads(json.dumps(facts)) == facts
    assert len(facts["gpus"]) == 8 and facts["topology"][0][7] == "NV18" and len(facts["rdma"]) == 8
    assert facts["packages"]["torch"] and facts["python"]


def test_variables_that_matter_are_kept_and_secrets_hidden(tmp_path: Path) -> None:
    facts = big_node(
        tmp_path, NCCL_DEBUG="INFO", TORCH_HOME="https://me:pass@host/x", NCCL_AUTH_TOKEN="abc", HOME="/root", HF_TOKEN="hf_x"
    )  # fmt: skip
    assert facts["variables"] == {
        "NCCL_AUTH_TOKEN": "***", "NCCL_DEBUG": "INFO", "TORCH_HOME": "https://***@host/x"
    }  # fmt: skip


def test_a_run_begins_with_a_few_lines(tmp_path: Path) -> None:
    facts = big_node(tmp_path)
    text = said(120, lambda console: print_hw_summary(console, facts, {"node 1 (gpu-8)": dict(facts)}))
    assert len(text.splitlines()) <= 6
    assert "2 × AMD EPYC 9654 96-Core Processor, 8 CPUs, 0.984 TiB memory" in text
    assert (
        "8 × NVIDIA H200 140 GiB (ECC on), driver 580.95.05, CUDA 13.0 (driver), 12.8 (torch), connected by NV18"
        in text
    )
    assert "eth0 100 Gb/s, 8 × InfiniBand 400 Gb/sec (4X NDR)" in text
    assert "NCCL 2.27.7" in text


def test_a_part_of_the_cards_is_told_as_a_part(tmp_path: Path) -> None:
    lines = dict(summary_lines(big_node(tmp_path, CUDA_VISIBLE_DEVICES="0,1")))
    assert lines["gpus"].startswith("8 × NVIDIA H200") and lines["gpus"].endswith("CUDA_VISIBLE_DEVICES=0,1")


def test_only_what_differs_on_another_node_is_told(tmp_path: Path) -> None:
    here = big_node(tmp_path / "a", NCCL_DEBUG="INFO", SHARDTUNE_NODE="0")
    cards = [*h200s(6), Card(links=["switch"] * 17 + [None])]
    there = {**big_node(tmp_path / "b", cards, SHARDTUNE_NODE="1"), "host": "gpu-8", "driver": "570.1"}
    there["memory"] = {**there["memory"], "total": int(there["memory"]["total"] * 0.99)}
    there["packages"] = {**there["packages"], "peft": "0.20.0"}
    lines = differences(here, there)
    assert lines == [
        "GPUs 7 × NVIDIA H200 140 GiB (ECC on) instead of 8 × NVIDIA H200 140 GiB (ECC on)",
        "NVLinks that are up 17 on 1 GPU, 18 on 6 GPUs instead of 18 on 8 GPUs",
        "driver 570.1 instead of 580.95.05",
        f"peft 0.20.0 instead of {here['packages']['peft']}",
        "NCCL_DEBUG is not set (here INFO)",
    ]
    text = said(80, lambda console: print_hw_summary(console, here, {"node 1 (gpu-8)": there}))
    assert "differs   node 1 (gpu-8): GPUs 7 × NVIDIA H200" in text
    assert "warning   node 1 (gpu-8): GPU 6 has NVLinks that are down: 17 (of 18)." in text
    assert differences(here, {**here, "host": "gpu-9"}) == []


def test_a_small_dev_shm_matters_only_to_data_workers(tmp_path: Path) -> None:
    facts = {**big_node(tmp_path), "shm": {"path": "/dev/shm", "total": 64 * 2**20, "free": 64 * 2**20}}
    assert concerns(facts) == []
    (warning,) = concerns(facts, workers=2)
    assert "/dev/shm has only 64 MiB" in warning and "train.dataloader_num_workers" in warning


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (Card(uncorrected=3), "GPU 0 has 3 uncorrectable ECC memory errors"),
        (Card(lanes=8), "GPU 0 is connected over 8 of 16 PCIe lanes"),
        (Card(mig=1), "GPU 0 is split into MIG instances"),
        (Card(lost=True), "GPU 0 is not reachable: GPU is lost"),
        (Card(links=[None, "switch"]), "GPU 0 has NVLinks that are down: 0 (of 2)"),
    ],
)
def test_a_card_in_trouble_is_named(tmp_path: Path, card: Card, words: str) -> None:
    (warning,) = concerns(big_node(tmp_path, [card, Card()]))
    assert words in warning


def test_a_healthy_card_is_not_warned_of(tmp_path: Path) -> None:
    assert concerns(big_node(tmp_path), workers=4) == []
    assert concerns(big_node(tmp_path, [Card(links=[None] * 18)])) == []  # bridges that nobody bought


@pytest.mark.parametrize("width", [80, 120])
def test_the_long_form_fits_its_terminal(tmp_path: Path, width: int) -> None:
    facts = big_node(tmp_path, NCCL_DEBUG="INFO")
    text = said(width, lambda console: show_hardware(console, facts))
    table = [line for line in text.splitlines() if "NV18" in line or "140 GiB" in line]
    assert len(table) >= 16 and all(len(line) <= width for line in table)
    assert "GPUs 0–7 links 0–17 up, version 4.0, 26.6 GB/s each way, to switch" in text
    assert "mlx5_7 port 1, ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)" in text
    assert "NCCL_DEBUG=INFO" in text
    assert "0  NVIDIA H200  140 GiB   on  345/1980     3201    700  1×16/5×16" in text


def test_cards_without_nvlink_show_where_they_meet(tmp_path: Path) -> None:
    nvml = FakeNvml([Card(links=[]), Card(links=[])], level=pynvml.NVML_TOPOLOGY_HOSTBRIDGE)
    facts = describe_hardware(tmp_path, nvml=nvml, root=machine(tmp_path, {}), environ={})
    text = said(80, lambda console: show_hardware(console, facts))
    assert "  PHB" in text and "nvlink    " not in text


def test_the_command_is_for_people_and_for_programs_and_does_not_import_torch(shardtune: Command) -> None:
    people = shardtune("env", env={"NCCL_DEBUG": "WARN", "PYTHONPROFILEIMPORTTIME": "1"})
    assert people.returncode == 0, people.stderr
    assert people.stdout.count("gpus      none (") == 1 or "driver" in people.stdout
    assert "NCCL_DEBUG=WARN" in people.stdout
    assert not any(line.rsplit("|", 1)[-1].strip() == "torch" for line in people.stderr.splitlines())
    programs = shardtune("env", "--json")
    assert json.loads(programs.stdout)["cpu"]["threads"] >= 1
