"""FP8 checkpoints in the forms there are: multiplied out exactly, whole or by rows, or kept as they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_toys import to_fp8
from safetensors.torch import load_file, save_file
from toys import toy_mistral4, toy_mixtral

from shardtune.config.schema import ModelSection
from shardtune.errors import UserInputError
from shardtune.kernels import fp8
from shardtune.model.load import load_model
from shardtune.model.meta_model import MetaModel, build_meta_model
from shardtune.model.quantized import use_fp8_storage
from shardtune.model.safetensors_headers import read_headers
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import load_shards, local_shards, materialize
from shardtune.train.build import fp8_blocks

FORMS = ["scalar", "one", "blocks", "rows"]


def section(folder: Path, dtype: str = "float32") -> ModelSection:
    return ModelSection(model_name_or_path=str(folder), torch_dtype=dtype)


def fused(values: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> torch.Tensor:
    """What `parameter` must be, where the checkpoint stores one tensor per expert (Mixtral's names)."""
    if name in values:
        return values[name]
    layer = name.split(".mlp.")[0]
    experts = range(parameter.shape[0])
    of = lambda w: torch.stack([values[f"{layer}.block_sparse_moe.experts.{e}.{w}.weight"] for e in experts])  # noqa: E731
    if name.endswith("gate_up_proj"):
        return torch.cat([of("w1"), of("w3")], 1)
    return of("w2") if name.endswith("down_proj") else values[name.replace(".mlp.", ".block_sparse_moe.")]


@pytest.fixture(params=["mistral4", "mixtral"])
def toy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    # 40 rows and 24 columns: blocks of 16 are ragged at both edges.
    if request.param == "mistral4":
        return toy_mistral4(tmp_path, moe_intermediate_size=24, hidden_size=40)
    return toy_mixtral(tmp_path, intermediate_size=32, hidden_size=40)


def kept(folder: Path, dtype: str = "float32") -> tuple[MetaModel, torch.nn.Module]:
    meta_model = build_meta_model(section(folder, dtype), folder, read_headers(folder))
    use_fp8_storage(meta_model.model, fp8_blocks(meta_model))
    materialize(meta_model.model, meta_model.model, torch.device("cpu"))
    with ShardReader(meta_model.mapping) as reader:
        load_shards(local_shards(meta_model.model, meta_model.mapping), reader)
    return meta_model, meta_model.model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_multiplied_out_it_is_what_codes_and_scales_say_experts_too(toy: Path, form: str, dtype: str) -> None:
    values = to_fp8(toy, form)
    model = load_model(section(toy, dtype))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fused(values, name, parameter).to(parameter.dtype)), name


@pytest.mark.parametrize("form", FORMS)
def test_rows_multiplied_out_alone_equal_those_of_the_whole(toy: Path, form: str) -> None:
    to_fp8(toy, form)
    whole = dict(load_model(section(toy, "bfloat16")).named_parameters())
    meta_model = build_meta_model(section(toy, "bfloat16"), toy, read_headers(toy))
    with ShardReader(meta_model.mapping) as reader:
        for name, parameter in whole.items():
            for first, last in (
                (0, 1),
                (1, 3),
                (len(parameter) // 3, len(parameter)),
                (len(parameter) - 1, len(parameter)),
            ):
                into = torch.full((last - first, *parameter.shape[1:]), torch.nan, dtype=torch.bfloat16)
                reader.run(reader.jobs(name, (first, last), into))
                assert torch.equal(into, parameter[first:last]), (name, first, last)


@pytest.mark.parametrize("form", FORMS)
def test_kept_in_float8_it_holds_the_stored_codes_and_computes_the_same(toy: Path, form: str) -> None:
    values = to_fp8(toy, form)
    meta_model, model = kept(toy)
    held = {name for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} < held
    assert held == set(meta_model.mapping.quantised)
    for name in held:
        parameter = model.get_parameter(name)
        block = meta_model.mapping.block(name)
        exact = fp8.dequantize(parameter, model.get_parameter(f"{name}_scale_inv"), block, torch.float32)
        assert torch.equal(exact, fused(values, name, parameter)), name
    ids = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, load_model(section(toy))(ids).logits, rtol=1e-5, atol=1e-5)


def test_activation_scales_are_counted_and_not_read(toy: Path) -> None:
    to_fp8(toy, "scalar")
    stored = read_headers(toy)
    meta_model = build_meta_model(section(toy), toy, stored)
    scales = [name for name in stored if name.endswith("activation_scale")]
    assert meta_model.mapping.unused_scales == len(scales) > 0


def test_a_checkpoint_in_full_is_quantised_on_load_and_the_error_told(tmp_path: Path) -> None:
    toy_mistral4(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    meta_model = build_meta_model(section(tmp_path), tmp_path, read_headers(tmp_path))
    use_fp8_storage(meta_model.model, fp8_blocks(meta_model))
    materialize(meta_model.model, meta_model.model, torch.device("cpu"))
    with ShardReader(meta_model.mapping) as reader:
        load_shards(local_shards(meta_model.model, meta_model.mapping), reader)
    difference = size = 0.0
    for name, parameter in meta_model.model.named_parameters():
        if parameter.dtype != torch.float8_e4m3fn:
            continue
        scale = meta_model.model.get_parameter(f"{name}_scale_inv")
        assert scale.shape == (*parameter.shape[:-1], 1)  # one for each row
        value = parameter.float() * scale
        rows = stored[name].abs().amax(-1, keepdim=True)
        assert ((value - stored[name]).abs() <= rows / 16).all()  # three bits of mantissa
        difference += float((value - stored[name]).square().sum())
        size += float(stored[name].square().sum())
    assert reader.error.relative == pytest.approx(math.sqrt(difference / size), rel=1e-3)
    assert 0.01 < reader.error.relative < 0.05
    assert meta_model.model.get_parameter("model.layers.0.mlp.gate.weight").dtype == torch.float32  # the router
    assert meta_model.model.get_parameter("lm_head.weight").dtype == torch.float32


def test_a_block_size_that_the_scales_contradict_is_told(toy: Path) -> None:
    to_fp8(toy, "blocks", block=(7, 7))
    with pytest.raises(UserInputError) as caught:
        load_model(section(toy))
    assert "do not fit it" in caught.value.what
    assert "[7, 7]" in caught.value.why


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(3, 3, 3), torch.ones(5, 1)])
def test_scales_of_no_known_shape_are_told(tmp_path: Path, wrong: torch.Tensor) -> None:
    toy_mistral4(tmp_path)
    to_fp8(tmp_path, "scalar")
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({**load_file(file), f"{name}_scale_inv": wrong}, file, {"format": "pt"})
    with pytest.raises(UserInputError, match="do not fit it"):
        load_model(section(tmp_path))


def test_a_scale_without_its_weight_is_told(tmp_path: Path) -> None:
    toy_mistral4(tmp_path)
    to_fp8(tmp_path, "scalar")
    file = tmp_path / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors["model.layers.0.self_attn.x_proj.weight_scale_inv"] = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserInputError) as caught:
        load_model(section(tmp_path))
    assert "x_proj.weight_scale_inv" in caught.value.what
