"""Each rank brings in its own slices: bit-identical to a plain load, no byte more read, no rank holding the whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fp8_toys import to_fp8
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from toys import big_llama, toy_llama, toy_mistral4, toy_mixtral, toy_wrapper
from weights_worker import digest, own_name

from shardtune.adapters.initialization import init_adapters
from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection

WORKER = Path(__file__).parent.parent / "weights_worker.py"
EXPERTS = {"target_modules": ["attention", "experts"], "r": 3}


def load_sharded_weights(
    environment: dict[str, str], out: Path, worlds: Sequence[int], cases: dict, timeout: float = 180
) -> dict[int, dict[str, list]]:
    """By number of ranks, what each rank saw in each case."""
    out.mkdir(parents=True, exist_ok=True)
    on_ranks(environment, WORKER, worlds, json.dumps(cases), out, timeout=timeout)
    return {
        world: {
            name: [json.loads((out / f"{name}-rank{rank}of{world}.json").read_text()) for rank in range(world)]
            for name in cases
        }
        for world in worlds
    }


def case(folder: Path, *, lora: dict | None = None, folders: dict | None = None, **model: Any) -> dict:
    settings = {"model_name_or_path": str(folder), "torch_dtype": "float32", **model}
    return {"model": settings, "lora": lora or {}, "folders": folders or {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    toy_llama(folder / "llama")
    toy_wrapper(folder / "wrapper")
    toy_mixtral(folder / "mixtral")
    toy_mistral4(folder / "fp8", moe_intermediate_size=24, hidden_size=40)
    to_fp8(folder / "fp8", "blocks")
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path, shared_environment: dict[str, str]) -> dict[int, dict[str, list]]:
    """Every case on 1, 2 and 3 ranks."""
    cases = {
        "wrapper": case(folder / "wrapper", lora={"experts": True}),
        "mixtral": case(folder / "mixtral", lora=EXPERTS),
        "multiplied-out": case(folder / "fp8", base_precision="bf16"),
        "kept": case(folder / "fp8", base_precision="fp8"),
        "sent": case(folder / "fp8", base_precision="fp8", load="rank0-broadcast"),
        "quantised": case(folder / "llama", base_precision="fp8"),
        "quantised-sent": case(folder / "llama", base_precision="fp8", load="rank0-broadcast"),
        "elsewhere": case(folder / "llama", folders={"1": str(folder / "nothing-here")}),
    }
    return load_sharded_weights(shared_environment, folder / "out", (1, 2, 3), cases)


def slices(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Rows as FSDP2 gives them out: equal parts rounded up, the last ranks short or empty."""
    step = -(-len(tensor) // ranks)
    return [tensor[rank * step : (rank + 1) * step] for rank in range(ranks)]


def assert_shards(seen: list[dict], expected: torch.nn.Module) -> None:
    for name, parameter in expected.named_parameters():
        for rank, part in enumerate(slices(parameter, len(seen))):
            assert seen[rank]["shards"][name] == digest(part), (name, rank)
    for name, buffer in expected.named_buffers():
        assert {rank["shards"][name] for rank in seen} == {digest(buffer)}, name  # RoPE is the same everywhere


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_of_a_wrapped_text_model_equal_a_plain_load(
    folder: Path, seen: dict[int, dict[str, list]], ranks: int
) -> None:
    wrapped = transformers.Mistral3ForConditionalGeneration.from_pretrained(folder / "wrapper")
    text = transformers.Mistral4ForCausalLM(wrapped.config.text_config)
    text.model, text.lm_head = wrapped.model.language_model, wrapped.lm_head
    found = seen[ranks]["wrapper"]
    assert_shards(found, text)
    assert sum(rank["bytes_read"] for rank in found) == sum(p.nbytes for p in text.parameters())
    assert all(rank["bytes_read"] == rank["local_bytes"] for rank in found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_experts_stored_one_by_one_and_adapters_are_cut_out_of_the_same_whole(
    folder: Path, seen: dict[int, dict[str, list]], ranks: int
) -> None:
    expected = transformers.MixtralForCausalLM.from_pretrained(folder / "mixtral")
    found = seen[ranks]["mixtral"]
    assert_shards(found, expected)
    model, *_ = add_lora(expected, LoraSection(lora_dropout=0, **EXPERTS))
    init_adapters(model, 7)
    whole = {own_name(name): p for name, p in model.named_parameters() if "lora_" in name}
    assert len(whole) == 2 * 2 * (4 + 2)
    for name, tensor in whole.items():
        assert [rank["shards"][name] for rank in found] == [digest(part) for part in slices(tensor, ranks)], name


def test_another_seed_draws_other_adapters_and_the_same_seed_the_same(folder: Path) -> None:
    model, *_ = add_lora(transformers.LlamaForCausalLM.from_pretrained(folder / "llama"), LoraSection())
    assert init_adapters(model, 1) == init_adapters(model, 1) != init_adapters(model, 2)


def test_an_fp8_checkpoint_is_cut_the_same_however_many_ranks_hold_it(seen: dict[int, dict[str, list]]) -> None:
    for name in ("multiplied-out", "kept", "quantised"):
        one, two, three = (seen[ranks][name] for ranks in (1, 2, 3))
        assert one[0]["local_bytes"] == sum(r["local_bytes"] for r in two) == sum(r["local_bytes"] for r in three)
        assert one[0]["shards"].keys() == two[0]["shards"].keys() == three[0]["shards"].keys()
    assert seen[1]["kept"][0]["local_bytes"] < 0.5 * seen[1]["multiplied-out"][0]["local_bytes"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rank_0_sends_what_the_others_would_have_read(seen: dict[int, dict[str, list]], ranks: int) -> None:
    for read, sent in (("kept", "sent"), ("quantised", "quantised-sent")):
        assert [rank["way"] for rank in seen[ranks][sent]] == ["rank0-broadcast"] * ranks
        assert [rank["shards"] for rank in seen[ranks][sent]] == [rank["shards"] for rank in seen[ranks][read]]
        assert [rank["bytes_read"] for rank in seen[ranks][sent][1:]] == [0] * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_node_without_the_files_gets_its_slices_from_rank_0(
    folder: Path, seen: dict[int, dict[str, list]], ranks: int
) -> None:
    found = seen[ranks]["elsewhere"]
    assert [rank["way"] for rank in found] == ["rank0-broadcast"] * ranks
    assert [rank["own_folder"] for rank in found] == [True, False, True][:ranks]
    assert_shards(found, transformers.LlamaForCausalLM.from_pretrained(folder / "llama"))


def test_nodes_with_different_checkpoints_are_told_apart(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(folder / "llama", tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, other / "model.safetensors")
    with pytest.raises(AssertionError, match="The nodes have different checkpoints of the model"):
        load_sharded_weights(
            environment, tmp_path / "out", [2], {"x": case(folder / "llama", folders={"1": str(other)})}
        )


@pytest.mark.slow
def test_two_gigabytes_on_two_and_three_ranks_cost_no_rank_more_than_its_shard(
    environment: dict[str, str], tmp_path: Path
) -> None:
    model = tmp_path / "big"
    size = big_llama(model, 2.0)
    assert size > 1.9e9
    assert len(list(model.glob("*.safetensors"))) > 3
    big = {"big": case(model, torch_dtype="bfloat16")}
    seen = {
        ranks: found["big"]
        for ranks, found in load_sharded_weights(environment, tmp_path, (2, 3), big, timeout=600).items()
    }
    plain = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    whole = sum(p.nbytes for p in plain.parameters())
    for ranks, found in seen.items():
        assert_shards(found, plain)
        assert sum(rank["bytes_read"] for rank in found) == whole
        for rank in found:
            assert rank["bytes_read"] == pytest.approx(whole / ranks, rel=0.01)
            assert rank["peak"] <= rank["local_bytes"] + 1.5e9
            assert rank["peak"] < 0.9 * whole  # what a rank that holds everything could not do
