"""The fast path and its eager twin side by side, on whatever device: the same model, batches, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from expert_toys import distance
from peft.tuners.lora.layer import ParamWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Mistral4Config, Mistral4ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from shardtune.adapters.fused import use_fused_lora
from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection, ParallelSection
from shardtune.data.collate import REAL_TOKENS, Collator
from shardtune.kernels import varlen
from shardtune.parallel.mesh import Mesh
from shardtune.parallel.shard import shard_model
from shardtune.train.losses import Loss, nll
from shardtune.train.losses.fused import use_fused_loss

Rows = list[list[tuple[np.ndarray, np.ndarray]]]
VOCABULARY, EXPERTS = 1000, 8


def dense(hidden: int) -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
            num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), head_dim=64,
            sliding_window=None, tie_word_embeddings=False,
        )
    )  # fmt: skip


def mixture(hidden: int) -> PreTrainedModel:
    return Mistral4ForCausalLM(
        Mistral4Config(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=hidden // 2,
            num_hidden_layers=2, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
            n_routed_experts=EXPERTS, num_experts_per_tok=2, n_shared_experts=1, q_lora_rank=128, kv_lora_rank=128,
            qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64,
        )
    )  # fmt: skip


KINDS = {"dense": dense, "mixture": mixture}


@contextmanager
def one_rank(device: str) -> Iterator[Mesh]:
    """A process group of this process alone."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = init_device_mesh(device, (1,), mesh_dim_names=("shard",))
        yield Mesh(1, 1, (0,), whole, whole)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Path:
    """A model that is adapted and sharded as a run does it, and what makes its batches."""

    model: Any
    collator: Collator
    device: str
    fast: bool

    def batch(self, rows: Rows) -> dict[str, Any]:
        made = self.collator(rows)
        return {k: v.to(self.device) if torch.is_tensor(v) else v for k, v in made.items() if k != REAL_TOKENS}

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Summed over supervised tokens; the eager twin takes it from logits."""
        return Loss(nll.LOSS, 0.0, fused=self.fast)(self.model, batch).loss

    def loss_and_gradients(self, rows: Rows) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        loss = self.loss(self.batch(rows))
        loss.backward()
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in trained.items()}
        return {"loss": loss.detach(), **{n: gradient.clone() for n, gradient in whole.items()}}


def build(
    kind: str, mesh: Mesh, dtype: torch.dtype, *, fast: bool, hidden: int, length: int, compiled: bool = False
) -> Path:
    """A path of the kind; all of them have the same weights, whatever they compute in."""
    torch.manual_seed(0)
    model = _lively(KINDS[kind](hidden))
    if kind == "mixture":
        _route_by_token(model)
    # Rounded for every dtype alike: float32 then computes exactly what bf16 means.
    model = model.bfloat16().to(mesh.device_type, dtype)
    targets = LoraSection(r=8, lora_alpha=16, lora_dropout=0.0, experts=True if kind == "mixture" else None)
    adapted, _, _ = add_lora(model, targets)
    _set_adapters(adapted, zero_rows=EXPERTS if kind == "mixture" else 0)
    layout, fill_to = ("flat", length) if fast else ("packed", None)
    if fast:
        use_fused_lora(adapted)
        use_fused_loss(model, causal=True)
        varlen.register()
        model.set_attn_implementation(varlen.NAME)
    else:
        for module in adapted.modules():
            if isinstance(module, ParamWrapper):
                module.__class__ = ParamWrapper  # as PEFT computes it: `W + B A` written out
    compute = dtype if dtype == torch.bfloat16 else None
    shard_model(adapted, ParallelSection(), mesh, compute, compiled=compiled)
    return Path(adapted, Collator(0, layout, fill_to=fill_to), mesh.device_type, fast)  # type: ignore[arg-type]


def differences(fast: Path, eager: Path, rows: Rows) -> dict[str, float]:
    """Relative errors of the loss and of every adapter's gradient."""
    mine, meant = fast.loss_and_gradients(rows), eager.loss_and_gradients(rows)
    assert mine.keys() == meant.keys() and len(mine) > 8
    return {name: distance(mine[name], meant[name]) for name in meant}


def packed_rows(length: int, seed: int, rows: int = 2) -> Rows:
    """Rows of documents, as many as the seed says, the first part of each without loss."""
    rng = np.random.default_rng(seed)
    return [_row(length, int(rng.integers(2, 9)), rng) for _ in range(rows)]


def _row(length: int, documents: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    cuts = np.sort(rng.choice(np.arange(4, length - 4), documents - 1, replace=False))
    made = []
    for size in np.diff([0, *cuts, length - int(rng.integers(1, 4))]):
        if size < 1:
            continue
        ids = rng.integers(3, VOCABULARY, size)
        labels = np.where(np.arange(size) < size // 3, -100, ids)
        made.append((ids, labels))
    return made


class HostReads(TorchDispatchMode):
    """Notes every operator whose result the host waits for: on a GPU each would stop it from running ahead."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in self.WAITING:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def varlen_by_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, _bounds_of_keys: torch.Tensor,
    _longest: int, _longest_key: int, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """What `varlen_attn` means, where flash attention does not run: causal within each document, by a mask."""
    reach, ahead = window_size
    assert ahead == 0
    position = torch.arange(query.shape[0], device=query.device)
    document = torch.searchsorted(bounds.long(), position, right=True)
    back = position[:, None] - position[None]
    seen = (document[:, None] == document[None]) & (back >= 0) & ((back <= reach) | (reach < 0))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out[0].transpose(0, 1)


def _lively(model: PreTrainedModel) -> PreTrainedModel:
    # With transformers' spread of 0.02 the layers hardly move the residual stream, and an error in them hides.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                writes = "o_proj" in name or "down_proj" in name
                parameter.normal_(std=(0.2 if writes else 1.0) * parameter.shape[-1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
    return model


def _route_by_token(model: PreTrainedModel) -> None:
    """Two experts for each token that rounding cannot change: the first places of the residual stream name them, and no
    layer writes there. (Otherwise one token in a hundred goes elsewhere in bf16, and nothing can be compared.)"""
    pairs = torch.tensor([(a, b) for a in range(EXPERTS) for b in range(a)])
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, :EXPERTS] = -1.0
        embeddings[:, :EXPERTS].scatter_(1, pairs[torch.arange(VOCABULARY) % len(pairs)], 1.0)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter[..., :EXPERTS, :] = 0.0
            if name.endswith("gate.weight"):
                parameter.copy_(torch.eye(*parameter.shape))


def _set_adapters(adapted: Any, zero_rows: int) -> None:
    """Adapters that do something; the outputs of layers that write to the residual stream begin with zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if not parameter.requires_grad:
                continue
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            if "lora_B" in name and len(parameter) == adapted.config.hidden_size:
                drawn[:zero_rows] = 0.0
            parameter.copy_((0.3 * drawn).bfloat16())
