"""Any family's checkpoint becomes the model transformers would have made, and nothing in it is left over or made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from toys import mixtral_config, save_toy, toy_llama, toy_mistral4, toy_text_config, toy_wrapper

from shardtune.config.schema import ModelSection
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.model.families.registry import families
from shardtune.model.load import load_model
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import load_shards, local_shards, materialize

TYPES = [(family, kind) for family in families() for kind in family.model_types]


def section(folder: Path, **settings: Any) -> ModelSection:
    return ModelSection(**{"model_name_or_path": str(folder), "torch_dtype": "float32", **settings})


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    for name, tensor in {**dict(ours.named_parameters()), **dict(ours.named_buffers())}.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "kind"), TYPES, ids=[kind for _, kind in TYPES])
def test_each_family_is_bit_identical_to_from_pretrained_buffers_too(
    family: Any, kind: str, dtype: str, tmp_path: Path
) -> None:
    cls = getattr(transformers, family.causal_lm[kind])
    save_toy(cls, toy_text_config(kind), tmp_path)
    assert_same(load_model(section(tmp_path, torch_dtype=dtype)), cls.from_pretrained(tmp_path, dtype=dtype))


def test_an_architecture_without_a_file_of_ours_loads_too(tmp_path: Path) -> None:
    save_toy(transformers.Starcoder2ForCausalLM, toy_text_config("starcoder2"), tmp_path)
    assert_same(load_model(section(tmp_path)), transformers.Starcoder2ForCausalLM.from_pretrained(tmp_path))


def test_a_rearrangement_that_is_not_built_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    toy_llama(tmp_path)
    turned = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Transpose(0, 1)])
    monkeypatch.setattr("shardtune.model.weight_mapping.get_model_conversion_mapping", lambda model: [turned])
    with pytest.raises(ShardtuneError) as caught:
        load_model(section(tmp_path))
    assert "rearranges 'model.layers.0.mlp.up_proj.weight' while loading (Transpose)" in caught.value.what


@pytest.mark.parametrize("new_names", [False, True])
def test_the_text_model_comes_out_of_its_wrapper_and_the_rest_is_not_read(tmp_path: Path, new_names: bool) -> None:
    toy_wrapper(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if new_names:  # as tools write them that save the model under its own names
        tensors = {
            name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            ): v
            for name, v in tensors.items()
        }
        save_file(tensors, file, {"format": "pt"})
    meta_model = build_meta_model(section(tmp_path), tmp_path, read_headers(tmp_path))
    assert (meta_model.wrapper.class_name, meta_model.family.name) == ("Mistral3ForConditionalGeneration", "mistral4")
    text = sum(t.nbytes for name, t in tensors.items() if "language_model" in name or name.startswith("lm_head"))
    materialize(meta_model.model, meta_model.model, torch.device("cpu"))
    with torch.no_grad():  # poisoned: what is not read stays NaN
        for parameter in meta_model.model.parameters():
            parameter.fill_(torch.nan)
    with ShardReader(meta_model.mapping) as reader:
        load_shards(local_shards(meta_model.model, meta_model.mapping), reader)
        assert reader.progress.bytes == text < sum(t.nbytes for t in tensors.values())
    wrapped = transformers.Mistral3ForConditionalGeneration.from_pretrained(tmp_path)
    expected = {
        **dict(wrapped.model.language_model.named_parameters(prefix="model")),
        "lm_head.weight": wrapped.lm_head.weight,
    }
    found = dict(meta_model.model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bytes_read_are_no_more_than_the_process_really_read(tmp_path: Path) -> None:
    toy_wrapper(tmp_path)
    meta_model = build_meta_model(section(tmp_path), tmp_path, read_headers(tmp_path))
    materialize(meta_model.model, meta_model.model, torch.device("cpu"))

    def read_by_process() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    with ShardReader(meta_model.mapping) as reader:
        own = local_shards(meta_model.model, meta_model.mapping)
        before = read_by_process()
        cost = read_by_process() - before  # of looking
        before = read_by_process()
        load_shards(own, reader)
        assert read_by_process() - before - cost == reader.progress.bytes == meta_model.mapping.bytes


def test_a_wrapper_nobody_described_is_refused(tmp_path: Path) -> None:
    toy_wrapper(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] = toy_text_config("qwen3").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserInputError) as caught:
        load_model(section(tmp_path))
    assert "packages a text model (qwen3) in mistral3" in caught.value.what


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "something-new"])
def test_other_quantisations_are_refused_with_what_to_use(toy_model: Path, tmp_path: Path, method: str) -> None:
    toy_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(UserInputError) as caught:
        load_model(section(tmp_path))
    assert f"quantised with {method}" in caught.value.what
    assert "base_precision: fp8" in caught.value.fix


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.to(torch.int8), "stored as int8"),
        (lambda t: t.to(torch.float8_e4m3fn), "stored in float8 without a scale"),
        (lambda t: t.to(torch.float8_e5m2), "stored as float8_e5m2"),
    ],
)
def test_a_dtype_that_cannot_be_meant_is_refused(tmp_path: Path, change: Any, told: str) -> None:
    toy_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: change(tensors[name])}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserInputError) as caught:
        load_model(section(tmp_path))
    assert name in caught.value.what
    assert told in caught.value.what


def test_half_of_the_experts_is_not_enough(tmp_path: Path) -> None:
    save_toy(transformers.MixtralForCausalLM, mixtral_config(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = [name for name in tensors if "layers.1" in name and ".experts.3." in name]
    assert len(gone) == 3
    save_file({k: v for k, v in tensors.items() if k not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserInputError) as caught:
        load_model(section(tmp_path))
    assert "model.layers.1.mlp.experts.gate_up_proj (6 × [16, 32] there, [4, 32, 32] in the model)" in caught.value.what


def test_a_library_that_is_too_old_is_told_with_the_version_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_mistral4(tmp_path)
    monkeypatch.setattr(transformers, "__version__", "5.10.0")
    with pytest.raises(UserInputError) as caught:
        load_model(section(tmp_path))
    assert "needs transformers 5.15.0 or later" in caught.value.what
    assert "5.10.0" in caught.value.why


def test_a_type_from_the_future_says_which_version_wrote_it(tmp_path: Path) -> None:
    toy_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "llama9", "transformers_version": "7.1.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserInputError) as caught:
        load_model(section(tmp_path))
    assert "does not know the model type 'llama9'" in caught.value.why
    assert "7.1.0" in caught.value.fix


def test_a_buffer_nobody_computes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_llama(tmp_path)
    meta_model = build_meta_model(section(tmp_path), tmp_path, read_headers(tmp_path))
    monkeypatch.setattr(type(meta_model.model), "_init_weights", lambda self, module: None)
    with pytest.raises(Exception, match=r"model\.rotary_emb\.(original_)?inv_freq' of LlamaForCausalLM has no value"):
        materialize(meta_model.model, meta_model.model, torch.device("cpu"))
