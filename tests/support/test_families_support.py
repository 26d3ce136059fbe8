"""Does every family compute, on each fast path it claims, what plain transformers and PEFT compute? And no other one?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fast_path
import pytest
import torch
from expert_toys import quantise
from resolving import resolved_for
from support.twins import (
    TYPES,
    adapted,
    any_config,
    as_peft_computes,
    attention,
    batch_of,
    differences,
    documents,
    loss_and_gradients,
    loss_from_logits,
    one_by_one,
    toy,
)

from shardtune.adapters.fused import use_fused_lora
from shardtune.errors import UserInputError
from shardtune.kernels import fp8, varlen, whole_rows
from shardtune.model.experts import fused_experts
from shardtune.model.families.generic import decoder_layers
from shardtune.model.families.registry import family_for, family_of
from shardtune.model.meta_model import MetaModel
from shardtune.model.quantized import use_fp8_storage
from shardtune.model.stored_names import SCALE
from shardtune.model.weight_mapping import WeightMapping
from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing
from shardtune.train.build import fp8_blocks, fuse
from shardtune.train.losses.fused import use_fused_loss

# What takes a second for each: a few of them in the fast tests.
FEW_FAST = [kind if kind in ("llama", "deepseek_v3") else pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES]
# Layers that take the keys and values of another one.
SHARED: dict[str, dict[str, Any]] = {"gemma4_text": {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}


def claims(path: str) -> list[str]:
    return [kind for kind in TYPES if path in family_for(kind).proven]  # type: ignore[union-attr]


def others(path: str) -> list[str]:
    return [kind for kind in TYPES if kind not in claims(path)]


def two_rows() -> list[list[Any]]:
    one, two, three, four = documents()
    return [[one, two], [three, four]]


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_computes_the_loss_and_gradients_of_plain_transformers_and_peft(kind: str, tmp_path: Path) -> None:
    """With everything `auto` chooses on this machine: packing, fused LoRA, fused loss, grouped experts."""
    meant = one_by_one(as_peft_computes(adapted(toy(kind))))
    base = toy(kind)
    train = resolved_for(any_config(tmp_path), base).config.train
    model, family = adapted(base), family_of(base)
    fuse(model, train)
    if train.fused_loss:
        use_fused_loss(base, causal=family.why_not("packing", base.config) is None)
    rows = two_rows() if train.packing else [[one] for one in documents()]
    batch = batch_of("packed" if train.packing else "padded", rows)
    assert differences(loss_and_gradients(model, batch, fused=bool(train.fused_loss)), meant) == {}


@pytest.mark.parametrize("kind", claims("packing"))
def test_documents_of_a_packed_row_stay_apart(kind: str) -> None:
    model = adapted(toy(kind))
    assert differences(loss_and_gradients(model, batch_of("packed", two_rows())), one_by_one(model)) == {}


@pytest.mark.parametrize("kind", others("packing"))
def test_where_they_would_not_packing_is_off_and_asking_for_it_is_refused(kind: str, tmp_path: Path) -> None:
    model = toy(kind)
    family = family_of(model)
    reason = family.unsupported["packing"]
    resolved = resolved_for(any_config(tmp_path), model)
    assert resolved.config.train.packing is False and resolved.reason("train.packing") == reason
    with pytest.raises(UserInputError, match="not known to keep the documents") as refused:
        resolved_for(any_config(tmp_path, "train.packing=true"), model)
    assert refused.value.why.lower() == f"{reason}.".lower()
    with torch.no_grad():  # the reason is a fact: they do read each other
        alone = sum(loss_from_logits(model, batch_of("padded", [[one]])) for one in documents())
        packed = loss_from_logits(model, batch_of("packed", two_rows()))
    assert abs(float(packed - alone)) > 1e-4 * float(alone)


@pytest.mark.parametrize("kind", claims("varlen"))
def test_variable_length_attention_is_given_all_that_a_family_asks_of_attention(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds, scale and windows; flash attention itself is stood in for by what it means (tests/gpu runs it)."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fast_path.varlen_by_mask)
    varlen.register()
    base = toy(kind)
    model = adapted(base)
    meant = one_by_one(model)
    with attention(base, varlen.NAME):
        assert differences(loss_and_gradients(model, batch_of("flat", two_rows())), meant) == {}


@pytest.mark.parametrize("kind", claims("whole_rows"))
def test_attention_over_whole_rows_needs_no_mask(kind: str) -> None:
    whole_rows.register()
    base = toy(kind, **({"sliding_window": 17} if hasattr(toy(kind).config, "sliding_window") else {}))
    model = adapted(base)
    meant = one_by_one(model)
    batch = batch_of("padded", [[one] for one in documents()])
    del batch["attention_mask"]
    with attention(base, whole_rows.NAME):
        assert differences(loss_and_gradients(model, batch), meant) == {}


@pytest.mark.parametrize("kernel", [varlen.NAME, whole_rows.NAME])
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_a_kernel_refuses_what_it_does_not_compute(kind: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fast_path.varlen_by_mask)
    varlen.register(), whole_rows.register()
    model = toy(kind, sliding_window=64)
    layout = "flat" if kernel == varlen.NAME else "padded"
    batch = batch_of(layout, two_rows() if layout == "flat" else [[one] for one in documents()])
    batch.pop("attention_mask", None)
    with attention(model, kernel), pytest.raises(ValueError, match=r"does not compute (softcap|s_aux)"):
        loss_from_logits(model, batch)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if family_for(kind).experts])  # type: ignore[union-attr]
def test_adapters_on_experts_have_the_gradients_of_peft_or_are_refused(kind: str) -> None:
    base = toy(kind, **MIXTURES.get(kind, {}))
    if "fused_experts" not in family_of(base).proven:
        with pytest.raises(UserInputError, match="support neither LoRA nor FP8 storage"):
            adapted(base, experts=True)
        return
    assert fused_experts(base)
    meant = one_by_one(as_peft_computes(adapted(toy(kind, **MIXTURES.get(kind, {})), experts=True)))
    assert differences(one_by_one(adapted(base, experts=True)), meant) == {}


@pytest.mark.parametrize("kind", FEW_FAST)
def test_a_base_held_in_fp8_trains_as_its_dequantised_twin_or_is_refused(kind: str) -> None:
    held, twin = toy(kind), toy(kind)
    family = family_of(held)
    blocks = fp8_blocks(MetaModel(held, family, None, WeightMapping({})))
    if family.experts and "fused_experts" not in family.proven:
        with pytest.raises(UserInputError, match="support neither LoRA nor FP8 storage"):
            use_fp8_storage(held, blocks)
        return
    values = {name: quantise(held.get_parameter(name), block) for name, block in blocks.items()}
    use_fp8_storage(held, blocks)
    with torch.no_grad():
        for name, (codes, scale) in values.items():
            held.get_parameter(name).copy_(codes)
            held.get_parameter(name + SCALE).copy_(scale)
            twin.get_parameter(name).copy_(fp8.dequantize(codes, scale, blocks[name], torch.float32))
    model = adapted(held)
    use_fused_lora(model)
    assert differences(one_by_one(model), one_by_one(as_peft_computes(adapted(twin)))) == {}


@pytest.mark.parametrize("kind", FEW_FAST)
def test_what_is_computed_again_in_the_backward_pass_gives_the_same_gradients(kind: str) -> None:
    base = toy(kind, **SHARED.get(kind, {}))
    model = adapted(base).train()
    meant = one_by_one(model)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    assert differences(one_by_one(model), meant) == {}
    base.gradient_checkpointing_disable()
    apply_selective_checkpointing(decoder_layers(base))
    if "selective" in family_of(base).unsupported:
        with pytest.raises(RuntimeError, match="mutated"):
            one_by_one(model)
    else:
        assert differences(one_by_one(model), meant) == {}
