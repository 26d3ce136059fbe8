"""Random mixtures of experts, plain and held in FP8, small enough to be made for each test."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Mistral4Config, Mistral4ForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from shardtune.kernels import fp8
from shardtune.model.quantized import fp8_candidates, use_fp8_storage
from shardtune.model.stored_names import SCALE

EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def toy_mistral4(seed: int = 0, hidden: int = 32) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Mistral4Config(
        vocab_size=72, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=hidden // 2 + 8,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=6, num_experts_per_tok=2,
        n_shared_experts=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _lively(Mistral4ForCausalLM(config))


def toy_mixtral(seed: int = 0, hidden: int = 32) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=72, hidden_size=hidden, intermediate_size=hidden // 2 + 8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _lively(MixtralForCausalLM(config))


TOYS = {"mistral4": toy_mistral4, "mixtral": toy_mixtral}
ATTENTION = {"mistral4": ["q_a_proj", "kv_b_proj", "o_proj"], "mixtral": ["q_proj", "v_proj"]}


def _lively(model: PreTrainedModel) -> PreTrainedModel:
    # With transformers' spread of 0.02 the layers of a toy hardly move the residual stream, and an error in them hides.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 if "gate.weight" in name else parameter.shape[-1] ** -0.5)
    return model


class Noted(TorchDispatchMode):
    """The operators that ran on floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def make_routers_sure(model: PreTrainedModel) -> None:
    """A token's first elements say which expert it prefers, by far: on the fence, any rounding would send it elsewhere."""
    embeddings = model.get_input_embeddings().weight
    for name, gate in model.named_parameters():
        if "mlp.gate.weight" in name:
            experts = gate.shape[0]
            with torch.no_grad():
                gate.zero_()[:, :experts] = torch.eye(experts)
                order = torch.stack([torch.randperm(experts) for _ in range(embeddings.shape[0])])
                embeddings[:, :experts] = order.float() * 2 - experts + 1


def toy_blocks(model: PreTrainedModel) -> dict[str, fp8.Block]:
    """Each kind of scale that checkpoints have: one for a tensor, one for a row, and blocks with ragged edges."""
    blocks: dict[str, fp8.Block] = {}
    for index, name in enumerate(fp8_candidates(model)):
        rows, columns = model.get_parameter(name).shape[-2:]
        blocks[name] = [(rows, columns), (1, columns), (12, 12)][index % 3]
    return blocks


def quantise(weight: torch.Tensor, block: fp8.Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a weight, block by block."""
    scale = torch.empty(fp8.scale_shape(weight.shape, block))
    codes = torch.empty_like(weight, dtype=fp8.CODES)
    for i in range(scale.shape[-2]):
        for j in range(scale.shape[-1]):
            at = (..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            one = weight[at].float().abs().amax(dim=(-2, -1)) / fp8.LARGEST_CODE
            scale[..., i, j] = one
            codes[at] = (weight[at].float() / one[..., None, None]).to(fp8.CODES)
    return codes, scale


def fp8_and_its_twin(kind: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A toy held in FP8, and the same toy with the dequantised values in `dtype`."""
    held, twin = TOYS[kind](), TOYS[kind]()
    blocks = toy_blocks(held)
    filled = {name: quantise(held.get_parameter(name).detach(), block) for name, block in blocks.items()}
    held.to(dtype), twin.to(dtype)
    use_fp8_storage(held, blocks)
    with torch.no_grad():
        for name, (codes, scale) in filled.items():
            held.get_parameter(name).copy_(codes)
            held.get_parameter(name + SCALE).copy_(scale)
            twin.get_parameter(name).copy_(fp8.dequantize(codes, scale, blocks[name], dtype))
    return held, twin


def adapted(
    model: PreTrainedModel, modules: list[str], parameters: list[str] | None = None, r: int = 3, seed: int = 1
) -> PeftModel:
    """PEFT's LoRA with float32 factors that do something: B is not left at zero."""
    parameters = EXPERT_PARAMETERS if parameters is None else parameters
    config = LoraConfig(
        r=r, lora_alpha=2 * r, lora_dropout=0.0, target_modules=modules, target_parameters=parameters,
        rank_pattern={"mlp.experts.gate_up_proj": r + 2} if len(parameters) > 1 else {},
    )  # fmt: skip
    peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return peft


def token_ids(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(3, 72, (rows, length), generator=torch.Generator().manual_seed(7))


def loss_and_gradients(model: PeftModel, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()
