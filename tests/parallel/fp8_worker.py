"""Run on ranks by test_fp8_sharding.py: mixtures of experts with LoRA, sharded; writes losses and whole gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from expert_toys import ATTENTION, adapted, fp8_and_its_twin, token_ids
from torch.distributed.tensor import DTensor

from shardtune.adapters.experts import use_grouped_products
from shardtune.config.schema import ParallelSection
from shardtune.errors import ShardtuneError
from shardtune.parallel import shard
from shardtune.parallel.mesh import Mesh, build_mesh
from shardtune.parallel.processes import join
from shardtune.train.proof import local

CASES: dict[str, dict[str, Any]] = {
    "mistral4": {"kind": "mistral4"},
    "mistral4 twin": {"kind": "mistral4", "held": False},
    "mixtral": {"kind": "mixtral", "reshard": False, "checkpointing": True},
    "mixtral twin": {"kind": "mixtral", "held": False},
    "mistral4 bf16": {"kind": "mistral4", "dtype": torch.bfloat16, "checkpointing": True},
    "mistral4 bf16 twin": {"kind": "mistral4", "dtype": torch.bfloat16, "held": False},
    "accumulated": {"kind": "mistral4", "accumulate": 2, "checkpointing": True},
}


def batch(rank: int, step: int = 0) -> torch.Tensor:
    """Each rank has rows of its own, so that its tokens go to other experts."""
    return token_ids(rows=20)[2 * (3 * step + rank) :][:2]


def build(
    mesh: Mesh, *, kind: str, held: bool = True, dtype: torch.dtype = torch.float32, reshard: bool = True
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The sharded model, and its frozen parameters as they were before."""
    base = fp8_and_its_twin(kind, dtype)[0 if held else 1]
    model = adapted(base, ATTENTION[kind])
    assert use_grouped_products(model) == 4
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    section = ParallelSection(device="cpu", reshard_after_forward=reshard)
    shard.shard_model(model, section, mesh, None if dtype == torch.float32 else dtype)
    # One process leaves what is frozen as it is.
    assert all(isinstance(p, DTensor) == (p.requires_grad or mesh.size > 1) for p in model.parameters())
    return model.train(), frozen


def run_case(mesh: Mesh, rank: int, *, checkpointing: bool = False, accumulate: int = 1, **how: Any) -> dict[str, Any]:
    model, frozen = build(mesh, **how)
    # Whole float8 tensors cannot be had from gloo (`full_tensor` knows no such scalar type): each rank looks at its own.
    before = {n: local(p).clone() for n, p in model.named_parameters() if not p.requires_grad}
    seen = _watch(model, frozen)
    if checkpointing:
        model.enable_input_require_grads()
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for _ in range(2):  # the second pass gathers again what the first has let go
        model.zero_grad()
        for step in range(accumulate):
            model.set_requires_gradient_sync(step == accumulate - 1)
            ids = batch(rank, step)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / accumulate).backward()
            losses.append(loss.item())
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    gradients = {n: p.grad.full_tensor().clone() for n, p in trained}
    after = {n: local(p) for n, p in model.named_parameters() if not p.requires_grad}
    changed = [name for name in before if not _same(before[name], after[name])]
    return {
        "losses": losses,
        "gradients": gradients,
        "seen": seen,
        "changed": changed,
        "local": shard.local_bytes(model),
    }


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _watch(model: torch.nn.Module, frozen: dict[str, torch.Tensor]) -> dict[str, tuple[str, bool]]:
    """What each FP8 weight and scale is while its layer computes: its dtype, and whether every bit is the stored one."""
    seen: dict[str, tuple[str, bool]] = {}

    def watch(layer: torch.nn.Module, prefix: str) -> None:
        def record(*_: object) -> None:
            for name, p in layer.named_parameters():
                if (
                    name.endswith("_scale_inv")
                    or p.dtype == torch.float8_e4m3fn
                    or f"{prefix}.{name}_scale_inv" in frozen
                ):
                    assert not isinstance(p, DTensor)
                    stored = _same(p.contiguous(), frozen[f"{prefix}.{name}"])
                    earlier = seen.get(f"{prefix}.{name}", ("", True))[1]
                    seen[f"{prefix}.{name}"] = (str(p.dtype), stored and earlier)

        # Within the layer, after its unit was gathered.
        layer.self_attn.register_forward_pre_hook(record)
        layer.mlp.register_forward_pre_hook(record)

    for prefix, module in model.named_modules():
        if hasattr(module, "self_attn"):
            watch(module, prefix)
    return seen


def refused_without_the_exemption(mesh: Mesh) -> str:
    keep, shard._exempt_fp8_from_cast = shard._exempt_fp8_from_cast, lambda *_: None
    try:
        model, _ = build(mesh, kind="mistral4", dtype=torch.bfloat16)
        model(input_ids=batch(0))
    except ShardtuneError as error:
        return str(error)
    finally:
        shard._exempt_fp8_from_cast = keep
    return ""


def main(out: str) -> None:
    warnings.filterwarnings("ignore", message="The following rank_pattern keys did not match")
    with join(ParallelSection(device="cpu")) as processes:
        results: dict[str, Any] = {}
        for name, how in CASES.items():
            results[name] = run_case(build_mesh(processes), processes.rank, **how)
        results["refused"] = refused_without_the_exemption(build_mesh(processes))
        torch.save(results, Path(out) / f"rank{processes.rank}.pt")
