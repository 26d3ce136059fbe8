"""What do most architectures call their parts? Names that many family files share."""

from __future__ import annotations

SELF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
MLP_ALIASES = {"w1": ("mlp.gate_proj",), "w2": ("mlp.down_proj",), "w3": ("mlp.up_proj",)}
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def mixture_aliases(*dense: str) -> dict[str, tuple[str, ...]]:
    """What the names of a gated feed-forward mean where routed experts stand beside dense or shared ones.

    Args:
        dense: The blocks that have gate_proj, up_proj and down_proj as modules, such as `mlp.shared_experts`.
    """
    block = dense[0].partition(".")[0] if dense else "mlp"
    gate, up, down = ((*(f"{one}.{name}" for one in dense),) for name in ("gate_proj", "up_proj", "down_proj"))
    gate, up = (*gate, f"{block}.experts.gate_up_proj"), (*up, f"{block}.experts.gate_up_proj")
    down = (*down, f"{block}.experts.down_proj")
    return {"gate_proj": gate, "up_proj": up, "down_proj": down, "w1": gate, "w2": down, "w3": up}


# Gated delta nets (Qwen3-Next, Qwen3.5).
QWEN3_5_DELTA_NET = (
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_a",
    "linear_attn.out_proj",
)
DELTA_NET_CARRIES_STATE = "gated delta nets carry state along the whole row, across documents"
DELTA_NET_IN_PLAIN_TORCH = (
    "Without the packages flash-linear-attention and causal-conv1d, transformers computes the delta nets in plain "
    "torch, many times slower."
)
