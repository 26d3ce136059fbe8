"""Every family's toy on a GPU, as a run computes it there, against float32: variable-length attention, compiled layers.

With SHARDTUNE_SUPPORT_RECORD=FILE the families that passed are written to FILE, which docs/support.md is made from
(tests/support/gpu.json).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fast_path
import pytest
import torch
from peft import PeftModel
from support.twins import TYPES, adapted, attention, batch_of, documents, loss_and_gradients, toy

from shardtune.adapters.fused import use_fused_lora
from shardtune.config.schema import ParallelSection
from shardtune.kernels import varlen
from shardtune.model.experts import use_grouped_experts
from shardtune.model.families.registry import family_for, family_of
from shardtune.model.model_outline import outline_of
from shardtune.parallel.mesh import Mesh
from shardtune.parallel.shard import shard_model
from shardtune.plan.gather import loss_obstacle
from shardtune.train.losses.fused import use_fused_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PASSED: dict[str, list[str]] = {"varlen": [], "compile": []}
# Every expert for every token: in bf16 a token on the fence would go elsewhere, and nothing could be compared.
ALL_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    torch.cuda.set_device(0)
    with fast_path.one_rank("cuda") as mesh:
        yield mesh


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    yield
    if file := os.environ.get("SHARDTUNE_SUPPORT_RECORD"):
        by = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(file).write_text(json.dumps({"by": by, **PASSED}, indent=1) + "\n", encoding="utf-8")


def claims(path: str) -> list[str]:
    return [kind for kind in TYPES if path in family_for(kind).proven]  # type: ignore[union-attr]


def make(kind: str, dtype: torch.dtype) -> PeftModel:
    """Weights that bf16 holds exactly, whatever the model computes in: float32 is then what both paths mean."""
    changes = ALL_EXPERTS | ({"topk_group": 2} if kind == "deepseek_v3" else {})
    base = toy(kind, **(changes if family_for(kind).experts else {}))  # type: ignore[union-attr]
    model = adapted(base.bfloat16().to(dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.cuda()


def errors(
    model: Any, batch: dict[str, Any], exact: dict[str, torch.Tensor], *, fused: bool = False
) -> dict[str, float]:
    found = loss_and_gradients(model, batch, fused=fused)
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in found.items()}
    assert full.keys() == exact.keys()
    return {n: ((full[n].float() - exact[n]).norm() / exact[n].norm()).item() for n in exact}


def too_far(ours: dict[str, float], twins: dict[str, float]) -> dict[str, tuple[float, float]]:
    """What is further from float32 than the eager twin in bf16 is; in a toy single gradients are mostly rounding."""
    mean = sum(twins.values()) / len(twins)
    return {n: (ours[n], twins[n]) for n in ours if not ours[n] < 2 * twins[n] + mean + 1e-2}


def rows() -> list[list[Any]]:
    one, two, three, four = documents()
    return [[one, two], [three, four]]


def exact(kind: str, layout: str) -> dict[str, torch.Tensor]:
    return loss_and_gradients(make(kind, torch.float32), batch_of(layout, rows(), "cuda"))


@pytest.mark.parametrize("kind", claims("varlen"))
def test_variable_length_attention_is_as_near_to_float32_as_its_twin(kind: str) -> None:
    varlen.register()
    meant = exact(kind, "packed")
    model = make(kind, torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        twin = errors(model, batch_of("packed", rows(), "cuda"), meant)
        with attention(model.get_base_model(), varlen.NAME):
            ours = errors(model, batch_of("flat", rows(), "cuda"), meant)
    assert too_far(ours, twin) == {}
    PASSED["varlen"].append(kind)


@pytest.mark.parametrize("kind", claims("compile"))
def test_compiled_layers_are_as_near_to_float32_as_their_twin(kind: str, mesh: Mesh) -> None:
    """With all that a run on a GPU has: bf16 by sharding, fused LoRA, grouped experts, fused loss, its attention."""
    torch._dynamo.reset()
    layer_class = family_for(kind).decoder_layer[kind]  # type: ignore[union-attr]
    meant = exact(kind, "packed")
    twin = make(kind, torch.bfloat16)
    shard_model(twin, ParallelSection(), mesh, torch.bfloat16, layer_class)
    twins = errors(twin, batch_of("packed", rows(), "cuda"), meant)

    fast = make(kind, torch.bfloat16)
    base = fast.get_base_model()
    family = family_of(base)
    use_fused_lora(fast)
    use_grouped_experts(fast)
    fused = loss_obstacle(outline_of(base, family)) is None
    if fused:
        use_fused_loss(base, causal=True)
    flat = family.why_not("varlen", base.config) is None
    if flat:
        varlen.register()
        base.set_attn_implementation(varlen.NAME)
    shard_model(fast, ParallelSection(), mesh, torch.bfloat16, layer_class, compiled=True)
    batch = batch_of("flat" if flat else "packed", rows(), "cuda")
    assert too_far(errors(fast, batch, meant, fused=fused), twins) == {}
    PASSED["compile"].append(kind)
