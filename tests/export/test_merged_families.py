"""Every architecture that can be trained can be merged: what is written loads with transformers and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export.exporting import export
from export.test_merged import loaded, logits
from tuned_toys import adapted_toy

from shardtune.model.families.registry import families, family_for

TYPES = sorted(kind for family in families() for kind in family.model_types)
NO_EXPERTS = ("gpt_oss", "llama4_text")  # with biases, or stored (in, out): training refuses LoRA on them


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_merged_it_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    family = family_for(kind)
    assert family is not None
    linear = (*family.attention, *family.mlp, *family.shared_experts, *family.other)
    settings: dict[str, object] = {"target_modules": [name.rpartition(".")[2] for name in linear]}
    if family.experts and kind not in NO_EXPERTS:
        settings["target_parameters"] = [*family.experts]
    peft = adapted_toy(kind, family.causal_lm[kind], settings, tmp_path)
    done = export(tmp_path / "adapter", tmp_path / "out")
    assert done.verification.method == "logits"
    assert done.verification.figures["logits_share"] == pytest.approx(1, abs=0.01)
    merged = loaded(tmp_path / "out", type(peft.base_model.model))
    torch.testing.assert_close(logits(merged), logits(peft), rtol=1e-3, atol=1e-3)
