"""A model that is read layer by layer computes what it does as a whole, and never holds two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import save_toy, toy_text_config

from shardtune.config.schema import ModelSection
from shardtune.export.layerwise import LayerwiseModel
from shardtune.model.families.registry import families
from shardtune.model.load import load_model
from shardtune.model.meta_model import build_meta_model
from shardtune.model.safetensors_headers import read_headers

TYPES = sorted(kind for family in families() for kind in family.model_types)
IDS = torch.tensor([[1, 5, 9, 20, 33, 41, 7, 12], [3, 4, 8, 8, 8, 60, 61, 62]])


def toy(kind: str, folder: Path) -> ModelSection:
    import transformers

    from shardtune.model.families.registry import family_for

    family = family_for(kind)
    assert family is not None
    save_toy(getattr(transformers, family.causal_lm[kind]), toy_text_config(kind), folder)
    return ModelSection(model_name_or_path=str(folder), torch_dtype="float32")


@pytest.mark.parametrize("kind", TYPES)
def test_it_computes_what_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    section = toy(kind, tmp_path)
    meta = build_meta_model(section, tmp_path, read_headers(tmp_path))
    layerwise = LayerwiseModel(meta.model, meta.model, meta.mapping, torch.device("cpu"))
    layerwise.load()
    seen: list[tuple[int, int]] = []

    def after(number: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        held = [index for index, (_, one) in enumerate(layerwise.layers) if not _is_on_meta(one)]
        seen.extend((number, index) for index in held)

    found = layerwise.logits(IDS, after)
    assert seen == [(0, 0), (1, 1)]
    assert all(_is_on_meta(layer) for _, layer in layerwise.layers)
    with torch.no_grad():
        wanted = load_model(section)(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert layerwise.nbytes < sum(parameter.nbytes for parameter in meta.model.parameters())


def _is_on_meta(layer: nn.Module) -> bool:
    return all(parameter.is_meta for parameter in layer.parameters())
