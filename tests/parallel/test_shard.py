"""Who holds what: DTensors on CPU too, each rank its part, and the whole adapter back out of the parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import nn

from shardtune.errors import UserInputError
from shardtune.parallel.shard import decoder_layers

WORKER = Path(__file__).parent / "sharded_worker.py"


@pytest.fixture(scope="module")
def two_ranks(shared_environment: dict[str, str], toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two-ranks")
    on_ranks(shared_environment, WORKER, 2, toy_model, out)
    return out


def test_every_parameter_is_sharded_on_cpu_too(two_ranks: Path) -> None:
    seen = [json.loads((two_ranks / "float32" / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all(rank["all_dtensors"] for rank in seen)
    assert sum(rank["local_bytes"] for rank in seen) == seen[0]["total_bytes"]
    assert all(rank["local_bytes"] == pytest.approx(rank["total_bytes"] / 2, rel=0.02) for rank in seen)
    assert seen[0]["units"] == 2


def test_an_adapter_gathered_from_shards_gives_the_live_models_logits_in_plain_peft(
    two_ranks: Path, toy_model: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    ids = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        untrained = base(ids).logits
        loaded = PeftModel.from_pretrained(base, two_ranks / "float32" / "adapter")(ids).logits
    live = torch.load(two_ranks / "float32" / "logits.pt", weights_only=True)
    torch.testing.assert_close(loaded, live, rtol=1e-5, atol=1e-5)
    assert (loaded - untrained).abs().max() > 0.01  # the adapter does something


def test_an_adapter_put_back_into_a_sharded_model_restores_every_slice(two_ranks: Path) -> None:
    for rank in range(2):
        assert json.loads((two_ranks / "float32" / f"rank{rank}.json").read_text())["restored"] < 1e-6


def test_ranks_agree_on_a_flag_and_hear_rank_0(two_ranks: Path) -> None:
    for rank in range(2):
        seen = json.loads((two_ranks / "float32" / f"rank{rank}.json").read_text())
        assert seen["agree"] == [True, False]
        assert seen["shared"] == "from 0"


def test_bf16_gathers_in_bf16_while_the_shards_stay_float32(two_ranks: Path) -> None:
    from safetensors.torch import load_file

    seen = json.loads((two_ranks / "bf16" / "rank0.json").read_text())
    assert seen["gathered_dtype"] == "torch.bfloat16"
    assert seen["local_bytes"] == pytest.approx(seen["total_bytes"] / 2, rel=0.02)
    tensors = load_file(two_ranks / "bf16" / "adapter" / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}


class _Layer(nn.Module):
    pass


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer()])


def test_a_layer_class_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UserInputError) as caught:
        decoder_layers(_Model(), "LlamaDecoderLayer")
    assert "LlamaDecoderLayer" in caught.value.what
    assert "_Layer (×2)" in caught.value.why


def test_a_model_that_names_no_layers_asks_for_the_class() -> None:
    with pytest.raises(UserInputError) as caught:
        decoder_layers(_Model(), None)
    assert "transformer_layer_cls_to_wrap" in caught.value.fix
    assert len(decoder_layers(_Model(), "_Layer")) == 2
