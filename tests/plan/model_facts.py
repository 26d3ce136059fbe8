"""Facts of models from their shapes, by hand: a Llama (or Mistral 7B, or Qwen3) and Mistral Small 4."""

from __future__ import annotations

from typing import Any

from shardtune.plan.facts import Facts, LayerKind, Machine

GIB = 2**30


def facts_of(
    model: dict[str, Any],
    kind: LayerKind,
    *,
    dtype: str = "bfloat16",
    nodes: tuple[int, ...] = (1,),
    device: str = "cuda",
) -> Facts:
    hidden, vocabulary = model["hidden_size"], model["vocab_size"]
    root = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not model.get("tie_word_embeddings"):
        root["lm_head.weight"] = (vocabulary, hidden)
    shapes = {name.removesuffix(".weight"): shape for name, shape in kind.parameters.items()}
    trained = 0
    for site, rank in kind.adapted.items():
        *experts, outputs, inputs = shapes[site]
        trained += kind.count * rank * (outputs + inputs) * (experts[0] if experts else 1)
    return Facts(
        machine=Machine(device, 139 * GIB, nodes[0], nodes, gpu="NVIDIA H200" if device == "cuda" else ""),
        model_type=model["model_type"],
        model_class="ForCausalLM",
        model=model,
        dtype=dtype,
        kinds=(kind,),
        root=root,
        trained=trained,
        layer_class=None,
        module_classes=frozenset(),
        own_attention="sdpa",
        attention_dropout=False,
        full_attention=True,
        missing={},
        unsupported={},
        loss_obstacle=None,
        router_coefficient=0.0,
        unused_router_loss=None,
        fill_share=lambda: 1.0,
    )


def llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, *, head: int = 128,
    tied: bool = False, rank: int = 16, only: tuple[str, ...] = (), **others: Any
) -> Facts:  # fmt: skip
    model = {
        "model_type": "llama", "hidden_size": hidden, "vocab_size": vocabulary, "num_attention_heads": heads,
        "head_dim": head, "tie_word_embeddings": tied,
    }  # fmt: skip
    shapes = {
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.k_proj.weight": (kv_heads * head, hidden),
        "self_attn.v_proj.weight": (kv_heads * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    sites = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    adapted = {site: rank for site in sites if not only or site.endswith(only)}
    return facts_of(model, LayerKind(layers, shapes, frozenset(), adapted), **others)


def dense_7b(**others: Any) -> Facts:
    return llama(4096, 14336, 32, 32, 8, 32768, **others)


def smollm_135m(**others: Any) -> Facts:
    return llama(576, 1536, 30, 9, 3, 49152, head=64, tied=True, **others)


def mistral4(layers: int, *, expert_rank: int = 0, quantised: bool = False, **others: Any) -> Facts:
    hidden, heads, expert, experts = 4096, 32, 2048, 128
    model = {
        "model_type": "mistral4", "hidden_size": hidden, "vocab_size": 131072, "num_attention_heads": heads,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 4,
        "n_routed_experts": experts,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj.weight": (1024, hidden),
        "self_attn.q_b_proj.weight": (heads * 128, 1024),
        "self_attn.kv_a_proj_with_mqa.weight": (256 + 64, hidden),
        "self_attn.kv_b_proj.weight": (heads * (64 + 128), 256),
        "self_attn.o_proj.weight": (hidden, heads * 128),
        "mlp.shared_experts.gate_proj.weight": (expert, hidden),
        "mlp.shared_experts.up_proj.weight": (expert, hidden),
        "mlp.shared_experts.down_proj.weight": (hidden, expert),
    }
    adapted = {name.removesuffix(".weight"): 16 for name in shapes}
    shapes |= {
        "mlp.experts.gate_up_proj": (experts, 2 * expert, hidden),
        "mlp.experts.down_proj": (experts, hidden, expert),
    }
    codes = frozenset(shapes) if quantised else frozenset()
    if expert_rank:
        adapted |= {"mlp.experts.gate_up_proj": expert_rank, "mlp.experts.down_proj": expert_rank}
    shapes |= {
        "mlp.gate.weight": (experts, hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_layernorm.weight": (1024,),
        "self_attn.kv_a_layernorm.weight": (256,),
    }
    return facts_of(model, LayerKind(layers, shapes, codes, adapted), **others)
