"""Which words may stand in lora.target_modules for a part of the model? Known here so that slips are found early."""

from __future__ import annotations

ALL_LINEAR = "all-linear"
ATTENTION = "attention"
MLP = "mlp"
EXPERTS = "experts"
SHARED_EXPERTS = "shared-experts"
ROUTER = "router"

WORDS = (ATTENTION, MLP, EXPERTS, SHARED_EXPERTS, ALL_LINEAR, ROUTER)

# Names of embeddings and output heads, which cannot have an adapter.
VOCABULARY = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "tok_embeddings")

# Both places that refuse dropout give this reason.
NO_DROPOUT = (
    "an adapter on a fused tensor or a router is computed as W + B·A, and dropout on its input is not possible there"
)


def entries_of(target_modules: str | list[str]) -> list[str]:
    """The entries of `lora.target_modules`, however it is written."""
    return [target_modules] if isinstance(target_modules, str) else list(target_modules)
