"""Merged weights load with plain transformers, and compute what PEFT computes with adapter and base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export.exporting import config_of, export, tensors_of
from safetensors.torch import load_file
from toys import toy_text_config
from tuned_toys import CASES, IDS, adapted_toy, tuned_toy

from shardtune.errors import UserInputError


def loaded(folder: Path, cls: type, dtype: torch.dtype = torch.float32) -> Any:
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_peft_does(case: str, tmp_path: Path) -> None:
    peft = tuned_toy(case, tmp_path)
    done = export(tmp_path / "adapter", tmp_path / "out")
    cls = type(peft.base_model.model)
    merged, base = loaded(tmp_path / "out", cls), cls.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert (logits(merged) - logits(base)).abs().max() > 0.01  # else nothing is compared
    torch.testing.assert_close(logits(merged), logits(peft), rtol=1e-4, atol=1e-4)
    assert done.verification.method == "logits"
    assert done.verification.figures["logits_share"] == pytest.approx(1, abs=1e-3)
    before, after = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "out")
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}
    assert config_of(tmp_path / "out") == config_of(tmp_path / "base")


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 33]}}, True),
        ({"target_modules": ["q_proj"]}, True),
    ],
    ids=["head in full", "embedding in full", "LoRA on the head", "rows of both", "neither"],
)
@pytest.mark.parametrize("twice", [False, True], ids=["stored once", "stored twice"])
def test_a_tied_head_that_changes_alone_is_untied(
    settings: dict[str, Any], tied: bool, twice: bool, tmp_path: Path
) -> None:
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    peft = adapted_toy("llama", "LlamaForCausalLM", settings, tmp_path, tie_word_embeddings=True)
    if twice:  # some checkpoints hold a tied head as well
        file = tmp_path / "base" / "model.safetensors"
        content = load_file(file)
        save_file({**content, "lm_head.weight": content["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    export(tmp_path / "adapter", tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is tied
    stored = tensors_of(tmp_path / "out")
    assert ("lm_head.weight" in stored) == (twice or not tied)
    if twice and tied:
        assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    torch.testing.assert_close(logits(loaded(tmp_path / "out", LlamaForCausalLM)), logits(peft), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [1 << 21, 32], ids=["in one piece", "row by row"])
def test_an_embedding_that_has_grown_takes_its_tokenizer_along(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtune.export.merged_tensors._AT_ONCE", at_once)
    from transformers import AutoTokenizer, LlamaForCausalLM

    settings = {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [70, 72, 73], "lm_head": [70, 72, 73]},
    }
    import peft as library

    tuned_toy("dense", tmp_path)
    shutil.rmtree(tmp_path / "adapter")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.resize_token_embeddings(74, mean_resizing=False)
    with torch.no_grad():  # rows that no adapter trains are zero
        model.get_input_embeddings().weight[72:] = 0
        model.get_output_embeddings().weight[72:] = 0
    adapted = library.get_peft_model(model, library.LoraConfig(r=2, task_type="CAUSAL_LM", **settings))  # type: ignore[arg-type]
    torch.manual_seed(3)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.add_tokens(["<call>", "<result>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "out")
    assert config_of(tmp_path / "out")["vocab_size"] == 74
    ids = torch.tensor([[1, 70, 72, 73, 5]])
    torch.testing.assert_close(
        logits(loaded(tmp_path / "out", LlamaForCausalLM), ids), logits(adapted.eval(), ids), rtol=1e-4, atol=1e-4
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(tokenizer)


def test_the_weights_are_cut_into_shards_that_transformers_reads(tmp_path: Path) -> None:
    peft = tuned_toy("dense", tmp_path)
    export(tmp_path / "adapter", tmp_path / "out", max_shard_bytes=30_000)
    names = sorted(file.name for file in (tmp_path / "out").glob("model*"))
    assert len(names) > 3 and names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
    assert names[-1] == "model.safetensors.index.json"
    assert all(file.stat().st_size < 32_000 for file in (tmp_path / "out").glob("*.safetensors"))
    merged = loaded(tmp_path / "out", type(peft.base_model.model))
    torch.testing.assert_close(logits(merged), logits(peft), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_another_dtype_is_what_all_weights_and_the_config_have(dtype: str, name: str, tmp_path: Path) -> None:
    tuned_toy("dense", tmp_path)
    done = export(tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    assert {str(tensor.dtype) for tensor in tensors_of(tmp_path / "out").values()} == {f"torch.{name}"}
    assert config_of(tmp_path / "out")["dtype"] == name
    assert done.verification.figures["logits_error"] < 0.02
    with pytest.raises(UserInputError, match="not stored in FP8"):
        export(tmp_path / "adapter", tmp_path / "fp8", dtype="fp8")


def test_bf16_weights_stay_bf16_and_what_is_not_changed_stays_byte_for_byte(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tuned_toy("dense", tmp_path)
    LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    export(tmp_path / "adapter", tmp_path / "out")
    before, after = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def test_a_change_that_bf16_swallows_is_warned_of_and_may_be_refused(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from shardtune.checkpoint.adapter import read_adapter, write_tensors

    tuned_toy("dense", tmp_path)
    LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    small = {n: t * (1e-5 if "lora_B" in n else 1) for n, t in read_adapter(tmp_path / "adapter").items()}
    write_tensors(tmp_path / "adapter" / "adapter_model.safetensors", small)
    done = export(tmp_path / "adapter", tmp_path / "out")
    assert any("--dtype fp32" in warning for warning in done.warnings)
    assert done.verification.figures["surviving_delta"] < 0.5
    assert export(tmp_path / "adapter", tmp_path / "fp32", dtype="fp32").warnings == ()
    with pytest.raises(UserInputError, match="would undo the fine-tuning"):
        export(tmp_path / "adapter", tmp_path / "refused", min_surviving_delta=0.8)
    assert not (tmp_path / "refused").exists()


def test_an_adapter_that_changes_nothing_says_so(tmp_path: Path) -> None:
    from shardtune.checkpoint.adapter import read_adapter, write_tensors

    tuned_toy("dense", tmp_path)
    untrained = {n: t * (0 if "lora_B" in n else 1) for n, t in read_adapter(tmp_path / "adapter").items()}
    write_tensors(tmp_path / "adapter" / "adapter_model.safetensors", untrained)
    done = export(tmp_path / "adapter", tmp_path / "out")
    assert any("changes nothing" in warning for warning in done.warnings)
    assert "does not move the logits" in done.verification.text


def test_a_model_whose_stored_names_are_not_its_own_keeps_the_stored_ones(tmp_path: Path) -> None:
    """Mixtral stores `block_sparse_moe.experts.0.w1`; transformers has `mlp.experts.gate_up_proj`."""
    assert toy_text_config("mixtral").model_type == "mixtral"
    tuned_toy("experts", tmp_path)
    export(tmp_path / "adapter", tmp_path / "out")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in tensors_of(tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_of_the_head_that_peft_writes_beside_lora_on_it_is_no_other_base(tied: bool, tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj", "lm_head"]}
    peft = adapted_toy("llama", "LlamaForCausalLM", settings, tmp_path, tie_word_embeddings=tied)
    peft.save_pretrained(tmp_path / "saved")  # as PEFT does unless it is told not to
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / "saved" / "adapter_model.safetensors")
    export(tmp_path / "saved", tmp_path / "out")
    merged = loaded(tmp_path / "out", type(peft.base_model.model))
    torch.testing.assert_close(logits(merged), logits(peft), rtol=1e-4, atol=1e-4)


def test_settings_of_an_adapter_in_the_folder_of_the_base_stay_there(tmp_path: Path) -> None:
    peft = tuned_toy("dense", tmp_path)
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", tmp_path / "base")
    export(tmp_path / "adapter", tmp_path / "out")
    loaded(tmp_path / "out", type(peft.base_model.model))  # transformers would look for that adapter's weights
