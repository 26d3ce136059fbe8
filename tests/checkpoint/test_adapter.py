from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from shardtune.adapters.lora import add_lora
from shardtune.checkpoint.adapter import WEIGHTS, gather_adapter, load_adapter, read_adapter, write_adapter
from shardtune.config.schema import LoraSection, ParallelSection
from shardtune.errors import ShardtuneError
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import join
from shardtune.parallel.shard import shard_model

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.arange(12).reshape(2, 6)


def base(kind: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same random weights at each call; Qwen2 has biases on q, k and v."""
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    return model.to(dtype).eval()


def trained(model: PreTrainedModel, seed: int = 1, **lora: Any) -> PeftModel:
    """As after training: every tensor that trains has moved."""
    adapted, _, _ = add_lora(model, LoraSection(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **lora}))
    torch.manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize(
    ("kind", "targets", "bias"),
    [
        ("llama", ["q_proj", "v_proj"], "none"),
        ("llama", ".*layers.1.*_proj", "none"),
        ("llama", "all-linear", "all"),  # there is no bias to train
        ("qwen2", "all-linear", "none"),
        ("qwen2", ["q_proj", "o_proj"], "all"),  # biases with and without an adapter beside them
        ("qwen2", ["q_proj", "o_proj"], "lora_only"),
        ("qwen2", "all-linear", "lora_only"),
    ],
)
def test_what_is_written_loads_with_plain_peft_and_computes_the_same(
    tmp_path: Path, kind: str, targets: Any, bias: Any
) -> None:
    model = trained(base(kind), target_modules=targets, bias=bias)
    assert (logits(model) - logits(base(kind))).abs().max() > 0.01  # or equality would prove nothing
    write_adapter(model, gather_adapter(model), tmp_path)
    loaded = PeftModel.from_pretrained(base(kind), tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("lora", [{"use_rslora": True}, {"lora_alpha": 7.0, "r": 2}])
def test_the_scale_of_the_adapter_is_written_with_it(tmp_path: Path, lora: dict) -> None:
    model = trained(base(), **lora)
    write_adapter(model, gather_adapter(model), tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path).eval()), logits(model))


@pytest.mark.parametrize(("bias", "tensors"), [("none", 8), ("lora_only", 8 + 4), ("all", 8 + 6)])
def test_exactly_what_trains_is_gathered(bias: Any, tensors: int) -> None:
    model = trained(base("qwen2"), bias=bias)
    gathered = gather_adapter(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(gathered) == len(trainable) == tensors
    assert sum(t.numel() for t in gathered.values()) == sum(p.numel() for p in trainable)


def test_adapters_of_a_bfloat16_model_are_written_in_float32(tmp_path: Path) -> None:
    model = trained(base(dtype=torch.bfloat16))
    write_adapter(model, gather_adapter(model), tmp_path)
    assert {tensor.dtype for tensor in read_adapter(tmp_path).values()} == {torch.float32}


def test_the_files_are_peft_s_and_other_users_can_read_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        model = trained(base())
        write_adapter(model, gather_adapter(model), tmp_path / "new")
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o044 for path in (tmp_path / "new").iterdir()}
    assert files == {"adapter_model.safetensors": 0o044, "adapter_config.json": 0o044}
    with safe_open(tmp_path / "new" / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in file.keys()  # noqa: SIM118


def test_writing_leaves_the_model_trainable(tmp_path: Path) -> None:
    model = trained(base())
    write_adapter(model, gather_adapter(model), tmp_path)
    assert model.peft_config["default"].inference_mode is False
    assert PeftModel.from_pretrained(base(), tmp_path).peft_config["default"].inference_mode is True


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_what_was_read_can_be_put_into_a_fresh_model(tmp_path: Path, bias: Any) -> None:
    model, fresh = trained(base("qwen2"), bias=bias), trained(base("qwen2"), seed=2, bias=bias)
    write_adapter(model, gather_adapter(model), tmp_path)
    assert not torch.equal(logits(fresh), logits(model))
    load_adapter(fresh, read_adapter(tmp_path))
    assert torch.equal(logits(fresh), logits(model))


def test_a_sharded_model_gives_whole_tensors_and_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    plain, other = trained(base("qwen2"), bias="all"), trained(base("qwen2"), seed=2, bias="all")
    wanted, section = gather_adapter(plain), ParallelSection(device="cpu")
    wanted = {name: tensor.clone() for name, tensor in wanted.items()}
    with join(section) as processes:
        for model in (plain, other):
            shard_model(model, section, build_mesh(processes), None)
            assert all(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
        gathered = gather_adapter(plain)
        assert not any(isinstance(tensor, DTensor) for tensor in gathered.values())
        assert gathered.keys() == wanted.keys()
        assert all(torch.equal(gathered[name], wanted[name]) for name in wanted)
        load_adapter(other, gathered)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in gather_adapter(other).items())
        write_adapter(other, gather_adapter(other), tmp_path)
    assert torch.equal(
        logits(PeftModel.from_pretrained(base("qwen2"), tmp_path).eval()), logits(trained(base("qwen2"), bias="all"))
    )


@pytest.mark.parametrize(
    ("foreign", "told"),
    [
        ({"target_modules": ["q_proj"]}, "v_proj"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "o_proj"),
        ({"bias": "all"}, "bias"),
        ({"r": 8}, "[8, 16] instead of [4, 16]"),
        ({"r": 1}, "[1, 16] instead of [4, 16]"),
    ],
)
def test_a_foreign_adapter_is_refused_and_nothing_is_changed(foreign: dict, told: str) -> None:
    model = trained(base("qwen2"))
    before = logits(model)
    with pytest.raises(ShardtuneError) as caught:
        load_adapter(model, gather_adapter(trained(base("qwen2"), seed=2, **foreign)))
    assert "does not match" in caught.value.what
    assert told in caught.value.why
    assert "lora settings" in caught.value.fix
    assert torch.equal(logits(model), before)
