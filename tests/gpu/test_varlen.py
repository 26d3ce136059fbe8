"""Variable-length attention against its eager twin, on a GPU: the same logits and gradients within bf16 rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Mistral4Config, Mistral4ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from shardtune.data.collate import REAL_TOKENS, SUPERVISED, TARGETS, Collator
from shardtune.kernels import varlen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def dense(sliding_window: int | None = None) -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, head_dim=64, sliding_window=sliding_window,
        )
    )  # fmt: skip


def mistral4() -> PreTrainedModel:
    return Mistral4ForCausalLM(
        Mistral4Config(
            vocab_size=1000, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=8, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
            q_lora_rank=128, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64,
        )
    )  # fmt: skip


def logits_and_gradients(model: PreTrainedModel, layout: str, rows: list) -> tuple[torch.Tensor, torch.Tensor]:
    made = Collator(0, layout)(rows)  # type: ignore[arg-type]
    labels = made.pop("labels").cuda()
    counted = (SUPERVISED, TARGETS, REAL_TOKENS)
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in made.items() if k not in counted}
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits[0].float()
    torch.nn.functional.cross_entropy(logits[:-1], labels[0, 1:], ignore_index=-100).backward()
    gradients = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    return logits.detach(), gradients


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize(
    "make", [dense, lambda: dense(sliding_window=50), mistral4], ids=["dense", "sliding", "mistral4"]
)
def test_varlen_is_as_near_to_float32_as_its_twin(make: type) -> None:
    varlen.register()
    torch.manual_seed(0)
    model = make().cuda()
    rng = np.random.default_rng(0)
    rows = [[(rng.integers(3, 900, n),) * 2 for n in (37, 200, 3, 512, 90, 130)]]
    model.set_attn_implementation("sdpa")
    exact = logits_and_gradients(model.float(), "packed", rows)
    twin = logits_and_gradients(model.bfloat16(), "packed", rows)
    model.set_attn_implementation(varlen.NAME)
    fast = logits_and_gradients(model, "flat", rows)
    for mine, twins, reference in zip(fast, twin, exact, strict=True):
        assert distance(mine, reference) < 1.2 * distance(twins, reference) + 1e-3
