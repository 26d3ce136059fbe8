"""Selective recomputation on a GPU: the gradients of keeping everything, and memory between that and full."""

from __future__ import annotations

import pytest
import torch
from expert_toys import make_routers_sure
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from toys import toy_text_config
from transformers import LlamaForCausalLM, Mistral4ForCausalLM

from shardtune.adapters.experts import use_grouped_products
from shardtune.adapters.fused import use_fused_lora
from shardtune.kernels import varlen
from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = 2048
KINDS = {
    "llama": (LlamaForCausalLM, {"intermediate_size": 1792}, ["q_proj", "v_proj", "o_proj", "down_proj"], []),
    "mistral4": (
        Mistral4ForCausalLM,
        {"moe_intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
         "qk_nope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 8},
        ["q_a_proj", "kv_b_proj", "o_proj"],
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
}  # fmt: skip


def toy(kind: str, way: str, *, compiled: bool) -> PeftModel:
    model_class, changes, modules, parameters = KINDS[kind]
    varlen.register()
    torch.manual_seed(0)
    config = toy_text_config(
        kind, hidden_size=512, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=TOKENS, **changes
    )
    base = model_class(config)
    make_routers_sure(base)  # compiled ways round differently: one token in 2048 sent elsewhere moves gradients by 2 %
    base = base.to("cuda", torch.bfloat16)
    base.set_attn_implementation(varlen.NAME)
    lora = LoraConfig(
        r=8, target_modules=modules, target_parameters=parameters, lora_dropout=0.0, init_lora_weights=False
    )
    model = get_peft_model(base, lora).to(torch.bfloat16).train()
    if parameters:
        use_grouped_products(model)
    use_fused_lora(model)
    layers = list(base.model.layers)
    if way == "selective":
        apply_selective_checkpointing(layers)
    if compiled:
        torch._dynamo.reset()
        for layer in layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
    if way == "full":
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def numbers(model: PeftModel) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss, gradients, and bytes held when the layers are through."""
    ids = torch.randint(3, 70, (1, TOKENS), generator=torch.Generator().manual_seed(2)).cuda()
    bounds = torch.tensor([0, 700, TOKENS], dtype=torch.int32, device="cuda")
    positions = torch.cat([torch.arange(700), torch.arange(TOKENS - 700)])[None].cuda()
    documents = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": TOKENS, "max_length_k": TOKENS}
    before = torch.cuda.memory_allocated()
    hidden = model.get_base_model().model(input_ids=ids, position_ids=positions, use_cache=False, **documents)[0]
    held = torch.cuda.memory_allocated() - before
    # A sum of squares behind a norm is a constant: its gradient would be rounding alone.
    towards = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).cuda()
    loss = (hidden.float() * towards).sum() / TOKENS
    loss.backward()
    return loss.detach(), {n: p.grad.float() for n, p in model.named_parameters() if p.requires_grad}, held


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_keeping_everything_and_memory_lies_in_between(kind: str, compiled: bool) -> None:
    found = {}
    for way in ("none", "selective", "full"):
        model = toy(kind, way, compiled=compiled)
        numbers(model)  # compiles, and makes what is made once
        model.zero_grad()
        found[way] = numbers(model)
    meant = found["none"]
    for way in ("selective", "full"):
        assert torch.allclose(found[way][0], meant[0], rtol=2e-2)
        for name, gradient in found[way][1].items():
            assert (gradient - meant[1][name]).norm() <= 2e-2 * meant[1][name].norm(), (way, name)
    assert found["full"][2] < found["selective"][2] < found["none"][2]
