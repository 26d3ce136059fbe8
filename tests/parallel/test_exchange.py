"""Ranks exchange JSON: what arrives is what was sent, and what JSON would alter is never sent."""

from __future__ import annotations

import ast
import json
from collections import namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from running import REPOSITORY

from shardtune.errors import ShardtuneError
from shardtune.parallel.exchange import from_bytes, tensor_from_spec, tensor_spec, to_bytes

WORKER = Path(__file__).parent / "exchange_worker.py"


class Level(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**80), 0.1, 5e-324, "", "\ud800é\n", [], {}, [[1, [None]], {"a": {"": [1.5, "x", False]}}],
     float("inf")],
)  # fmt: skip
def test_what_json_holds_comes_back_as_it_was(value: Any) -> None:
    back = from_bytes(to_bytes(value))
    assert back == value and type(back) is type(value)


def test_not_a_number_comes_back_too() -> None:
    assert str(from_bytes(to_bytes([float("nan")]))) == "[nan]"


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1: "a"}, {("a", "b"): 1}, b"bytes", {1, 2}, torch.zeros(1), np.float64(1), np.int64(1), Path("a"),
     Level.ONE, namedtuple("Pair", "a")(1), torch.float32, ValueError("x")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_json_would_alter_raises_and_says_where(value: Any) -> None:
    with pytest.raises(TypeError, match="ranks exchange JSON"):
        to_bytes(value)
    with pytest.raises(TypeError, match=r"it\['deep'\]\[1\]"):
        to_bytes({"deep": [0, value]})


def test_bytes_that_are_no_json_are_told() -> None:
    with pytest.raises(ShardtuneError, match="not JSON"):
        from_bytes(b"\x80\x04\x95")


@pytest.mark.parametrize("tensor", [torch.zeros(3, 0, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float8_e4m3fn)])
def test_an_outline_has_shape_and_dtype(tensor: torch.Tensor) -> None:
    made = tensor_from_spec(from_bytes(to_bytes(tensor_spec(tensor))))
    assert made.is_meta and made.shape == tensor.shape and made.dtype == tensor.dtype


@pytest.mark.parametrize("number", [torch.tensor(1e-45), torch.tensor(7), torch.tensor(False), torch.tensor(1 / 3)])
def test_an_outline_of_a_single_number_keeps_it(number: torch.Tensor) -> None:
    made = tensor_from_spec(from_bytes(to_bytes(tensor_spec(number))))
    assert made.dtype == number.dtype and torch.equal(made, number)


def test_an_outline_names_a_dtype_and_nothing_else_of_torch() -> None:
    with pytest.raises(ShardtuneError, match="unknown dtype 'load'"):
        tensor_from_spec({"shape": [1], "dtype": "load", "value": None})


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory, shared_environment: dict[str, str]) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("exchange")
    on_ranks(shared_environment, WORKER, 3, out)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(3)]


def sent(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "é\ud800" * 100 * rank, "big": 2**80 + rank, "small": 0.1 + rank, "none": None}


def test_every_rank_receives_what_the_others_have_sent(received: list[dict[str, Any]]) -> None:
    everyone = [sent(rank) for rank in range(3)]
    assert [seen["shared"] for seen in received] == [sent(0)] * 3
    assert [seen["empty"] for seen in received] == [""] * 3
    assert [seen["everywhere"] for seen in received] == [everyone] * 3
    assert [seen["gathered"] for seen in received] == [everyone, [], []]
    assert [seen["not_numbers"] for seen in received] == [["-inf", "nan", "nan"]] * 3


def test_different_data_is_refused_on_every_rank_with_the_same_words(received: list[dict[str, Any]]) -> None:
    assert [seen["same"] for seen in received] == [[], [], []]
    for case in ("one_odd", "all_odd"):
        code, what, why, fix = received[0][case]
        assert [seen[case] for seen in received] == [[code, what, why, fix]] * 3
        assert code == 2 and "same files" in fix
    assert received[0]["one_odd"][1] == "Other data than on most ranks was prepared on rank 1 (host1)."
    assert received[0]["one_odd"][2] == (
        "fingerprint abc on rank 0 (host0), rank 2 (host2); fingerprint other on rank 1 (host1)."
    )
    assert received[0]["all_odd"][1] == "The ranks have prepared different data."
    assert "fingerprint own2 on rank 2 (host2)" in received[0]["all_odd"][2]


def test_nothing_in_the_package_pickles() -> None:
    """torch's `*_object*` collectives unpickle what they receive; so does torch.load unless it is told not to."""
    found = []
    for path in sorted((REPOSITORY / "shardtune").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            found += [f"{path.name}:{node.lineno} {name}" for name in names if _unpickles(name)]  # type: ignore[attr-defined]
            if isinstance(node, ast.Attribute) and node.attr == "load" and getattr(node.value, "id", "") == "torch":
                found.append(f"{path.name}:{node.lineno} torch.load")
    assert found == []


def _unpickles(name: str) -> bool:
    collectives = ("broadcast_object_list", "gather_object", "all_gather_object", "scatter_object_list",
                   "send_object_list", "recv_object_list")  # fmt: skip
    return name in collectives or name.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib")
