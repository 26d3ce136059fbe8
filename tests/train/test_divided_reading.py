"""Replicas divide the reading: the same weights as if each had read all of them, of which each has read a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fp8_toys import to_fp8
from ranks import on_ranks
from toys import toy_llama, toy_mistral4, toy_mixtral

from shardtune.train.divided_reading import seconds_alone, seconds_divided

WORKER = Path(__file__).parent.parent / "weights_worker.py"
CASES = ("experts", "dequantised", "kept", "quantised")


def cases(folder: Path, **common: Any) -> dict[str, dict]:
    def case(name: str, **model: Any) -> dict:
        settings = {"model_name_or_path": str(folder / name), "torch_dtype": "float32", **common["model"], **model}
        return {**common, "model": settings}

    return {
        "experts": {**case("mixtral"), "lora": {"target_modules": ["attention", "experts"], "r": 3}},
        "dequantised": case("fp8", base_precision="bf16"),
        "kept": case("fp8", base_precision="fp8"),
        "quantised": case("llama", base_precision="fp8"),
    }


def load(environment: dict[str, str], out: Path, world: int, asked: dict[str, dict], nodes: str = "") -> dict:
    out.mkdir()
    on_ranks(environment, WORKER, world, json.dumps(asked), out, nodes, timeout=300)
    return {
        name: [json.loads((out / f"{name}-rank{rank}of{world}.json").read_text()) for rank in range(world)]
        for name in asked
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    toy_llama(folder / "llama")
    toy_mixtral(folder / "mixtral")
    toy_mistral4(folder / "fp8", moe_intermediate_size=24, hidden_size=40)
    to_fp8(folder / "fp8", "blocks")
    return folder


@pytest.mark.parametrize(("world", "shards"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_replicas_that_divide_the_reading_hold_what_each_would_have_read(
    folder: Path, environment: dict[str, str], tmp_path: Path, world: int, shards: int
) -> None:
    replicas = world // shards
    asked = {
        f"{load} {name}": case
        for load in ("read-all", "read-once")
        for name, case in cases(folder, shards=shards, model={"load": load}).items()
    }
    asked["auto"] = cases(folder, shards=shards, model={"load": "auto"}, disk_bytes_per_second=2e4)["kept"]
    seen = load(environment, tmp_path / "out", world, asked)
    for name in CASES:
        alone = seen[f"read-all {name}"]
        assert [rank["way"] for rank in alone] == ["read-all"] * world
        divided = seen[f"read-once {name}"]
        assert [rank["way"] for rank in divided] == ["read-once"] * world
        assert [rank["readers"] for rank in divided] == [replicas] * world
        assert [rank["shards"] for rank in divided] == [rank["shards"] for rank in alone]
        for mine, whole in zip(divided, alone, strict=True):
            assert mine["bytes_read"] == pytest.approx(whole["bytes_read"] / replicas, rel=0.35)
            assert mine["progress"][0] == pytest.approx(mine["progress"][1], rel=0.02)  # grids of scales are shared
        read = sum(rank["bytes_read"] for rank in divided)
        assert read == pytest.approx(sum(rank["bytes_read"] for rank in alone) / replicas, rel=0.02)
    # Each of them reads slowly, and they send each other much more in the same time.
    assert [rank["readers"] for rank in seen["auto"]] == [replicas] * world
    assert [rank["shards"] for rank in seen["auto"]] == [rank["shards"] for rank in seen["read-all kept"]]


@pytest.mark.slow
def test_ranks_divide_the_reading_with_whom_it_is_faster(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Two nodes of two ranks."""
    model = {"model_name_or_path": str(folder / "llama"), "torch_dtype": "float32"}
    asked = {
        "fast": {"model": model, "shards": 1},
        "slow": {"model": model, "shards": 1, "disk_bytes_per_second": 3e4},
        "node": {"model": model, "shards": 1, "disk_bytes_per_second": 3e4, "network_bytes_per_second": 1e3},
    }
    seen = load(environment, tmp_path / "out", 4, asked, nodes="0,0,1,1")
    assert [rank["way"] for rank in seen["fast"]] == ["read-all"] * 4  # so little is not worth a message
    assert [rank["readers"] for rank in seen["slow"]] == [4] * 4
    assert [rank["readers"] for rank in seen["node"]] == [2] * 4
    assert [rank["shards"] for rank in seen["node"]] == [rank["shards"] for rank in seen["fast"]]
    assert [rank["shards"] for rank in seen["slow"]] == [rank["shards"] for rank in seen["fast"]]
    disk, link = seen["slow"][0]["rates"]
    assert 0 < disk < 1e5 < link
    assert all(rank["rates"] == [disk, link] for rank in seen["slow"])
    assert seen["fast"][0]["rates"][1] is None


@pytest.mark.parametrize(
    ("disk", "cache", "link", "nodes", "pays"),
    [
        (1e9, 4e9, 1e10, 3, True),  # nodes with slow disks and a fast network
        (1e9, 4e9, 1e9, 3, False),
        (1e9, 4e9, 1.9e9, 2, False),
        (1e9, 4e9, 2.1e9, 2, True),
        (1e9, 4e9, 1e11, 1, False),  # ranks of one node: its page cache has what another rank has read
        (32e9, 4e9, 1e11, 1, True),  # eight ranks whose files are in the page cache, linked faster than each reads
    ],
)
def test_dividing_pays_where_broadcasts_are_faster_than_reading(
    disk: float, cache: float, link: float, nodes: int, pays: bool
) -> None:
    assert (seconds_divided(1e11, disk, link, nodes) < seconds_alone(1e11, disk, cache)) is pays
