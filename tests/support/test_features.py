"""Does each pair of features compute the loss and gradients of plain transformers and PEFT? Or is it refused, as stated?

In one process, on toys: what is compared is what a run builds, before the first step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expert_toys import quantise
from peft import PeftModel
from resolving import resolved_for
from support.features import CELLS, FAST, HOW, PLAIN, REFUSED, RUNS, WHAT, Cell
from support.twins import (
    any_config,
    as_peft_computes,
    batch_of,
    differences,
    documents,
    loss_and_gradients,
    move,
    one_by_one,
    toy,
)
from transformers import PreTrainedModel

from shardtune.adapters.lora import add_lora
from shardtune.config import ResolvedConfig
from shardtune.errors import ShardtuneError
from shardtune.kernels import fp8
from shardtune.model.families.generic import decoder_layers
from shardtune.model.families.registry import family_of
from shardtune.model.meta_model import MetaModel
from shardtune.model.quantized import use_fp8_storage
from shardtune.model.stored_names import SCALE
from shardtune.model.weight_mapping import WeightMapping
from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing
from shardtune.train.build import fp8_blocks, fuse
from shardtune.train.losses.fused import use_fused_loss

NEW_TOKENS = sorted({int(ids[0]) for ids, _ in documents()})  # that stand in the rows


def config_of(folder: Path, cell: Cell) -> ResolvedConfig:
    first, second = cell
    how = [*PLAIN, *HOW[second]] if second in HOW else [*WHAT[second], *FAST]
    dropout = "lora.lora_dropout=0"
    return any_config(folder, dropout, *WHAT[first], *how)


def base_of(cell: Cell) -> PreTrainedModel:
    return toy("mixtral") if "expert LoRA" in cell else toy("llama", attention_bias=True, mlp_bias=True)


def build(config: ResolvedConfig, cell: Cell, *, dequantised: bool = False) -> PeftModel:
    """The adapted toy that a config describes; what it holds in FP8 perhaps as the values that stand for."""
    base = base_of(cell)
    if config.config.model.base_precision == "fp8":
        blocks = fp8_blocks(MetaModel(base, family_of(base), None, WeightMapping({})))
        codes = {name: quantise(base.get_parameter(name), block) for name, block in blocks.items()}
        if not dequantised:
            use_fp8_storage(base, blocks)
        with torch.no_grad():
            for name, (code, scale) in codes.items():
                value = fp8.dequantize(code, scale, blocks[name], torch.float32) if dequantised else code
                base.get_parameter(name).copy_(value)
                if not dequantised:
                    base.get_parameter(name + SCALE).copy_(scale)
    model, _, _ = add_lora(base, config.config.lora, None, tuple(NEW_TOKENS) if config.config.model.new_tokens else ())
    return move(model)


def as_a_run_computes(cell: Cell, resolved: ResolvedConfig) -> dict[str, torch.Tensor]:
    train = resolved_for(resolved, base_of(cell)).config.train
    model = build(resolved, cell)
    base = model.get_base_model()
    fuse(model, train)
    if train.fused_loss:
        use_fused_loss(base, causal=True)
    if train.gradient_checkpointing == "selective":
        apply_selective_checkpointing(decoder_layers(base))
    elif train.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    one, two, three, four = documents()
    rows = [[one, two], [three, four]] if train.packing else [[row] for row in (one, two, three, four)]
    batch = batch_of("packed" if train.packing else "padded", rows)
    return loss_and_gradients(model.train(), batch, fused=bool(train.fused_loss))


HERE = [cell for cell in CELLS if cell[1] not in RUNS]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in HERE if frozenset(cell) not in REFUSED], ids=" + ".join)
def test_a_pair_computes_what_plain_transformers_and_peft_compute(cell: Cell, tmp_path: Path) -> None:
    resolved = config_of(tmp_path, cell)
    meant = one_by_one(as_peft_computes(build(resolved, cell, dequantised=True)))
    assert differences(as_a_run_computes(cell, resolved), meant) == {}


@pytest.mark.parametrize("cell", [cell for cell in HERE if frozenset(cell) in REFUSED], ids=" + ".join)
def test_a_pair_that_cannot_be_is_refused_with_its_reason(cell: Cell, tmp_path: Path) -> None:
    with pytest.raises(ShardtuneError) as refused:
        resolved = config_of(tmp_path, cell)
        as_a_run_computes(cell, resolved)
    assert REFUSED[frozenset(cell)] in " ".join(str(refused.value).split())
