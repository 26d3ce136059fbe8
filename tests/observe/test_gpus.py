from __future__ import annotations

import inspect
import json

import pynvml
from fake_nvml import Card, FakeNvml, h200s

from shardtune.observe.gpus import describe_gpus


def test_the_fake_answers_to_the_names_and_arguments_of_the_real_library() -> None:
    for name, function in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            real = list(inspect.signature(getattr(pynvml, name)).parameters)
            assert list(inspect.signature(function).parameters)[1:] == real, name


def test_a_card_is_described_with_what_it_tells() -> None:
    nvml = FakeNvml(h200s(2))
    found = json.loads(json.dumps(describe_gpus(nvml)))
    card = found["gpus"][1]
    assert (found["driver"], found["cuda_driver"]) == ("580.95.05", "13.0")
    assert (card["index"], card["name"], card["memory"]) == (1, "NVIDIA H200", 150_754_820_096)
    assert card["ecc"] == {"enabled": True, "uncorrected": 0}
    assert card["clocks"] == {"sm_mhz": 345, "sm_max_mhz": 1980, "memory_mhz": 3201, "memory_max_mhz": 3201}
    assert (card["power_limit_watts"], card["persistence"], card["mig"]) == (700.0, True, False)
    assert card["pcie"] == {"generation": 1, "max_generation": 5, "width": 16, "max_width": 16}
    assert card["nvlink"][17] == {
        "link": 17, "active": True, "version": "4.0", "megabytes_per_second": 26562, "peer": "switch"
    }  # fmt: skip
    assert len(card["nvlink"]) == 18
    assert nvml.open == 0


def test_what_a_card_does_not_tell_is_absent() -> None:
    silent = Card(ecc=None, power_milliwatts=None, persistence=None, mig=None, links=[])
    (card,) = describe_gpus(FakeNvml([silent]))["gpus"]
    assert not {"ecc", "power_limit_watts", "persistence", "mig", "nvlink"} & card.keys()
    assert "topology" not in describe_gpus(FakeNvml([silent]))


def test_a_function_the_library_does_not_have_is_a_question_without_an_answer() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetMigMode = None  # type: ignore[assignment]

    assert "mig" not in describe_gpus(Old(h200s(1)))["gpus"][0]


def test_two_cards_are_joined_by_their_links_or_by_what_they_hang_on() -> None:
    assert describe_gpus(FakeNvml(h200s(2)))["topology"] == [["X", "NV18"], ["NV18", "X"]]
    bridged = [Card(links=[1, 1, None]), Card(links=[0, 0, None]), Card(links=[])]
    found = describe_gpus(FakeNvml(bridged, level=pynvml.NVML_TOPOLOGY_NODE))
    assert found["topology"] == [["X", "NV2", "NODE"], ["NV2", "X", "NODE"], ["NODE", "NODE", "X"]]
    assert [link.get("peer") for link in found["gpus"][0]["nvlink"]] == ["GPU 1", "GPU 1", None]
    assert [link["active"] for link in found["gpus"][0]["nvlink"]] == [True, True, False]


def test_a_machine_without_a_driver_says_why_there_is_no_gpu() -> None:
    assert describe_gpus(FakeNvml(None)) == {"no_gpu": "NVML Shared Library Not Found"}
    assert describe_gpus(FakeNvml([])) == {"no_gpu": "NVML reports no GPU"}


def test_a_lost_card_is_named_and_the_others_are_described() -> None:
    found = describe_gpus(FakeNvml([Card(links=[2]), Card(lost=True), Card(links=[0])]))
    assert found["unreachable_gpus"] == [{"index": 1, "error": "GPU is lost"}]
    assert [(card["index"], card["nvlink"][0]["peer"]) for card in found["gpus"]] == [(0, "GPU 2"), (2, "GPU 0")]
    assert found["topology"] == [["X", "NV1"], ["NV1", "X"]]
