"""A merged model that is not adapter + base is found: nothing is published of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export.exporting import export
from safetensors.torch import load_file, save_file
from toys import toy_text_config
from tuned_toys import adapted_toy, tuned_toy

from shardtune.errors import ShardtuneError
from shardtune.export.logits_check import LogitsComparison
from shardtune.export.samples import Samples
from shardtune.inference.source import find_tuned

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
ATTENTION = "model.layers.0.self_attn.o_proj.weight"  # square in this toy
KIND = "qwen3_moe"
SETTINGS = {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj"]}


def samples() -> Samples:
    ids = torch.randint(3, 70, (4, 32), generator=torch.Generator().manual_seed(0))
    return Samples(ids, torch.ones_like(ids, dtype=torch.bool), "drawn")


def all_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Tensors], Tensors]:
    """Every tensor's change, changed."""
    return lambda base, merged: {name: base[name] + change(merged[name] - base[name]) for name in merged}


def only(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Tensors], Tensors]:
    return lambda base, merged: {**merged, name: base[name] + change(merged[name] - base[name])}


def experts_in_another_order(base: Tensors, merged: Tensors) -> Tensors:
    """As where a stack is read in the wrong order."""
    names = [f"model.layers.1.mlp.experts.{i}.{part}.weight" for i in range(4) for part in ("gate_proj", "up_proj")]
    turned = dict(merged)
    for name in names:
        expert = int(name.split(".")[5])
        other = name.replace(f"experts.{expert}.", f"experts.{(expert + 1) % 4}.")
        turned[name] = base[name] + (merged[other] - base[other])
    return turned


def unrelated(base: Tensors, merged: Tensors) -> Tensors:
    name = "model.layers.1.self_attn.v_proj.weight"  # which the adapter does not touch
    return {**merged, name: merged[name] + 0.3 * torch.randn_like(merged[name])}


FAULTS = {
    "the scale is doubled": all_of(lambda delta: 2 * delta),
    "the scale is 5 % too small": all_of(lambda delta: 0.95 * delta),
    "one layer's change is missing": only(ATTENTION, torch.zeros_like),
    "one change is transposed": only(ATTENTION, lambda delta: delta.T),
    "experts are in another order": experts_in_another_order,
    "nothing was merged": all_of(torch.zeros_like),
    "another weight has moved": unrelated,
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    config = toy_text_config(KIND)
    assert config.num_attention_heads * config.head_dim == config.hidden_size
    adapted_toy(KIND, "Qwen3MoeForCausalLM", SETTINGS, folder)
    export(folder / "adapter", folder / "out")
    return folder


def comparison(folder: Path) -> LogitsComparison:
    return LogitsComparison(find_tuned(str(folder / "adapter")), {}, {})


def test_what_was_merged_right_passes(merged: Path) -> None:
    found = comparison(merged).check(merged / "out", samples())
    assert found.logits is not None and found.logits.share == pytest.approx(1, abs=1e-4)
    assert list(found.layers) == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, merged: Path, tmp_path: Path) -> None:
    for file in (merged / "out").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    base, right = (load_file(merged / name / "model.safetensors") for name in ("base", "out"))
    wrong = FAULTS[fault](base, right)
    assert any(not torch.equal(wrong[name], right[name]) for name in right)
    save_file({name: tensor.contiguous() for name, tensor in wrong.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ShardtuneError, match="does not do what adapter and base do"):
        comparison(merged).check(tmp_path, samples())


def test_logits_alone_would_not_show_it(merged: Path, tmp_path: Path) -> None:
    """Why differences are compared: with a small adapter, a merge that lost all of it has nearly the right logits."""
    from shardtune.checkpoint.adapter import read_adapter, write_tensors

    for file in (merged / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    small = {n: t * (0.003 if "lora_B" in n else 1) for n, t in read_adapter(tmp_path).items()}
    write_tensors(tmp_path / "adapter_model.safetensors", small)
    tuned = LogitsComparison(find_tuned(str(tmp_path)), {}, {})
    with pytest.raises(ShardtuneError, match="does not do what adapter and base do"):
        tuned.check(merged / "base", samples())


@pytest.mark.parametrize("size", [1e-6, 1e-7])
def test_a_change_as_small_as_float32_is_exact_is_no_false_alarm(size: float, tmp_path: Path) -> None:
    """As after one step of a warmup: what is left of it beside the sums of a layer's output is mostly their rounding."""
    from shardtune.checkpoint.adapter import read_adapter, write_tensors

    tuned_toy("dense", tmp_path)
    small = {n: t * (size if "lora_B" in n else 1) for n, t in read_adapter(tmp_path / "adapter").items()}
    write_tensors(tmp_path / "adapter" / "adapter_model.safetensors", small)
    found = export(tmp_path / "adapter", tmp_path / "out").verification
    assert found.method == "logits"
