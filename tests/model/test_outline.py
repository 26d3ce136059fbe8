"""A model described from its files alone is the model that transformers builds: every name, every shape, every fact."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fp8_toys import to_fp8
from model.families.test_families import PACKAGED, VARIANTS, wrapped
from resolving import CPU
from running import REPOSITORY
from safetensors.torch import load_file, save_file
from support.twins import TYPES, any_config
from toys import mistral4_config, save_toy, toy_llama, toy_mixtral, toy_qwen3_moe, toy_text_config, wrapper_config

from shardtune.adapters.lora import add_lora
from shardtune.adapters.targets import resolve_targets
from shardtune.config.schema import LoraSection, ModelSection
from shardtune.errors import UserInputError
from shardtune.model.families.config_defaults import config_defaults, current_defaults
from shardtune.model.families.registry import family_for
from shardtune.model.meta_model import build_meta_model
from shardtune.model.outline import NeedsTorch, Outline, read_outline
from shardtune.model.safetensors_headers import read_headers
from shardtune.model.text_config import completed
from shardtune.plan.facts import Facts
from shardtune.plan.gather import gather_facts

CASES = [(kind, changes) for kind in TYPES for changes in VARIANTS.get(kind, [{}])]
NOT_COMPARED = {"model", "module_classes", "fill_share"}  # what files say, what nobody has built, a question


def section(folder: Path, **settings: Any) -> ModelSection:
    return ModelSection(**{"model_name_or_path": str(folder), "torch_dtype": "auto", **settings})


def outlines(folder: Path, **settings: Any) -> tuple[Outline, Outline]:
    """From the files, and of the model on the meta device."""
    asked, stored = section(folder, **settings), read_headers(folder)
    return read_outline(asked, folder, stored), build_meta_model(asked, folder, stored).outline


def assert_same(folder: Path, tmp_path: Path, *overrides: str, **settings: Any) -> Outline:
    files, built = outlines(folder, **settings)
    assert files.parameters == built.parameters
    assert (files.quantised, files.layers, files.dtype) == (built.quantised, built.layers, built.dtype)
    assert (files.model_class, files.embedding, files.head) == (built.model_class, built.embedding, built.head)
    config = any_config(tmp_path, *overrides).config
    found, meant = (gather_facts(config, outline, CPU, lambda: 1.0) for outline in (files, built))
    names = [field.name for field in fields(Facts) if field.name not in NOT_COMPARED]
    differences = {name for name in names if getattr(found, name) != getattr(meant, name)}
    assert not differences, [(getattr(found, name), getattr(meant, name)) for name in differences]
    return files


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=[f"{kind}{''.join(c)}" for kind, c in CASES])
def test_each_family_has_the_parameters_sites_and_facts_of_the_built_model(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    family = family_for(kind)
    assert family is not None
    save_toy(getattr(transformers, family.causal_lm[kind]), toy_text_config(kind, **changes), tmp_path)
    assert_same(tmp_path, tmp_path)
    files, built = outlines(tmp_path)
    for targets in ("all-linear", "attention"):
        lora = LoraSection(r=2, target_modules=targets, lora_dropout=0.0)
        assert resolve_targets(files, lora).sites == resolve_targets(built, lora).sites
    linear = {name for name in built.linear if not built.below_layer(name)[0]}
    assert linear == {*family.outside, built.head}


@pytest.mark.parametrize("text", PACKAGED)
def test_the_text_model_of_a_wrapper_is_found_under_its_own_names(text: str, tmp_path: Path) -> None:
    family = family_for(text)
    assert family is not None
    save_toy(getattr(transformers, family.wrappers[0].class_name), wrapped(text), tmp_path)
    files = assert_same(tmp_path, tmp_path)
    assert not any("vision" in name or "visual" in name for name in files.parameters)


@pytest.mark.parametrize("form", ["scalar", "one", "blocks", "rows"])
@pytest.mark.parametrize("make", [toy_mixtral, toy_qwen3_moe, None], ids=["mixtral", "qwen3_moe", "mistral3"])
def test_scales_of_fp8_are_no_parameters_and_experts_stored_one_by_one_are_one_tensor(
    make: Any, form: str, tmp_path: Path
) -> None:
    if make is None:
        save_toy(transformers.Mistral3ForConditionalGeneration, wrapper_config(mistral4_config()), tmp_path)
    else:
        make(tmp_path)
    to_fp8(tmp_path, form)
    files = assert_same(tmp_path, tmp_path)
    layer = "model.layers.0.mlp.experts"
    assert {f"{layer}.gate_up_proj", f"{layer}.down_proj"} < files.quantised
    assert len(files.parameters[f"{layer}.gate_up_proj"]) == 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", None])
def test_dtype_and_tied_head_are_those_of_a_run(tied: bool, dtype: str | None, tmp_path: Path) -> None:
    config = toy_text_config("llama", tie_word_embeddings=tied)
    save_toy(transformers.LlamaForCausalLM, config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if tied:  # as other tools write it
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    stored = {name: tensor.to(getattr(torch, dtype or "float16")) for name, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps({**raw, **({"torch_dtype": dtype} if dtype else {})}))
    files = assert_same(tmp_path, tmp_path)
    assert files.dtype == ("float32" if dtype == "float32" else "bfloat16")
    assert ("lm_head.weight" in files.parameters) is not tied


def test_ignored_tensors_and_layers_beyond_the_last_are_not_counted(tmp_path: Path) -> None:
    family = family_for("deepseek_v3")
    assert family is not None
    save_toy(transformers.DeepseekV3ForCausalLM, toy_text_config("deepseek_v3", num_hidden_layers=1), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {"model.layers.61.eh_proj.weight": torch.ones(4, 8), "extra.weight": torch.ones(3, 3)}
    save_file({**tensors, **more}, file, {"format": "pt"})
    assert_same(tmp_path, tmp_path, ignore_tensors=["^extra"])


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", ["lora.use_dora=true", "lora.target_modules=[q_proj, v_proj]", "lora.rank_pattern={v_proj: 4}"]),
        ("phi", ["lora.bias=all", "lora.modules_to_save=[embed_tokens]"]),
        ("phi", ["lora.bias=lora_only", "lora.layers_to_transform=[1]", "lora.target_modules=attention"]),
        ("qwen2_moe", ["lora.experts=true", "lora.expert_r=3", "lora.lora_dropout=0", "lora.bias=lora_only"]),
        ("mixtral", ["lora.target_modules=[router, o_proj]", "lora.lora_dropout=0", "lora.modules_to_save=[norm]"]),
    ],
)
def test_what_trains_is_counted_as_what_a_run_trains(kind: str, overrides: list[str], tmp_path: Path) -> None:
    family = family_for(kind)
    assert family is not None
    cls = getattr(transformers, family.causal_lm[kind])
    save_toy(cls, toy_text_config(kind), tmp_path)
    files, _ = outlines(tmp_path)
    config = any_config(tmp_path, *overrides).config
    adapted, _, _ = add_lora(cls.from_pretrained(tmp_path), config.lora)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert gather_facts(config, files, CPU, lambda: 1.0).trained == trained


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_are_counted(tied: bool, tmp_path: Path) -> None:
    save_toy(transformers.LlamaForCausalLM, toy_text_config("llama", tie_word_embeddings=tied), tmp_path)
    files, _ = outlines(tmp_path)
    config = any_config(tmp_path, "model.new_tokens=[<a>, <b>]").config
    adapted, _, _ = add_lora(transformers.LlamaForCausalLM.from_pretrained(tmp_path), config.lora, None, [70, 71])
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert gather_facts(config, files, CPU, lambda: 1.0).trained == trained


def test_a_key_that_config_json_leaves_out_means_what_transformers_means() -> None:
    assert current_defaults() == {kind: config_defaults(kind) for kind in current_defaults()}, "make reference"


LAYERS = [
    *((kind, {}) for kind in TYPES),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("gemma3_text", {"sliding_window_pattern": 3}),
    ("cohere2", {"sliding_window_pattern": 2}),
    ("qwen3_next", {"full_attention_interval": 2}),
    ("lfm2", {"full_attn_idxs": [1, 4]}),
    ("llama4_text", {"no_rope_layers": [1, 0, 1, 1, 0, 1, 0]}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2}),
    ("ministral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), LAYERS, ids=[f"{kind}-{'-'.join(c)}" for kind, c in LAYERS])
def test_the_kind_of_each_layer_is_derived_as_transformers_does(kind: str, changes: dict[str, Any]) -> None:
    raw = {"num_hidden_layers": 7, **changes}
    theirs = transformers.CONFIG_MAPPING[kind](**raw)
    ours = completed({"model_type": kind, **raw})
    assert (ours.get("layer_types") or None) == (getattr(theirs, "layer_types", None) or None)
    if kind != "qwen2_moe":  # 0 = no window there
        assert ours.get("sliding_window") == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "starcoder2"}, "no family file for starcoder2"),
        ({}, "the family file of llama says nothing"),
    ],
)
def test_what_files_do_not_tell_is_a_signal_to_build_the_model(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    toy_llama(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.extra.weight": torch.ones(3, 3)}, file, {"format": "pt"})
    with pytest.raises(NeedsTorch) as caught:
        read_outline(section(tmp_path), tmp_path, read_headers(tmp_path))
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("settings", "stored", "why"),
    [({"weights": "random"}, False, "model.weights is random"), ({"trust_remote_code": True}, True, "its own code")],
)
def test_a_model_without_stored_weights_or_with_its_own_code_is_one_too(
    settings: dict[str, Any], stored: bool, why: str, tmp_path: Path
) -> None:
    toy_llama(tmp_path)
    with pytest.raises(NeedsTorch) as caught:
        read_outline(section(tmp_path, **settings), tmp_path, read_headers(tmp_path) if stored else {})
    assert why in caught.value.why


@pytest.mark.parametrize("gone", ["layers.1.", "lm_head", ".experts.3.w1", ".experts.3."])
def test_a_checkpoint_that_lacks_something_is_refused(gone: str, tmp_path: Path) -> None:
    toy_mixtral(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if gone not in k}, file, {"format": "pt"})
    with pytest.raises(UserInputError, match=r"missing|incomplete") as caught:
        read_outline(section(tmp_path), tmp_path, read_headers(tmp_path))
    assert not isinstance(caught.value, NeedsTorch)


def test_a_plan_needs_neither_torch_nor_transformers() -> None:
    modules = "shardtune.plan.resolve, shardtune.plan.gather, shardtune.model.outline"
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'peft', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
