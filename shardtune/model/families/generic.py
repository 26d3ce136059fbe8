"""What is a model made of that has no family file? A look at its modules (on any device, also meta) and their names."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn

from shardtune.model.families.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Role = Literal["attention", "mlp", "shared_experts", "experts", "router"]

# What mixes tokens: attention, and what stands in its place.
_MIXERS = ("attn", "attention", "mamba", "conv")
_MLP_PARENTS = ("mlp", "feed_forward", "feedforward", "ffn", "moe")
# Feed-forward layers that stand in the decoder layer itself (OPT, BART's kin).
_MLP_NAMES = ("fc1", "fc2", "fc_in", "fc_out")
# The output of one fused projection, under the names architectures give it.
_FUSED_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv")


def inspect_family(model: PreTrainedModel) -> Family:
    """What the names and classes of a model's modules say. Whatever they do not say stands in `doubts`."""
    model_type = model.config.model_type
    layers = decoder_layers(model)
    layer_class = Counter(type(layer).__name__ for layer in layers).most_common(1)[0][0] if layers else ""
    found: dict[Role, dict[str, None]] = {role: {} for role in get_args(Role)}
    doubts: dict[str, None] = {}
    bypassed: dict[str, None] = {}
    if not layers:
        doubts["No list of decoder layers was found."] = None
    for layer in layers:
        if type(layer).__name__ != layer_class:
            doubts[f"Layers of class {type(layer).__name__} are mixed with {layer_class}."] = None
            continue
        for name, role in _roles(layer):
            parent = layer.get_submodule(name.rpartition(".")[0])
            if name.endswith(".out_proj") and "mamba" in f"{name} {type(parent).__name__}".lower():
                bypassed[name] = None  # the kernel of a state-space layer reads its weight; PEFT refuses it
            elif role is None:
                doubts[f"Cannot tell whether {name} belongs to attention or MLP."] = None
            else:
                found[role][name] = None
    parts: dict[Role, tuple[str, ...]] = {role: tuple(names) for role, names in found.items()}
    return Family(
        name=model_type,
        model_types=(model_type,),
        causal_lm={model_type: type(model).__name__},
        decoder_layer={model_type: layer_class},
        attention=parts["attention"],
        mlp=parts["mlp"],
        shared_experts=parts["shared_experts"],
        experts=parts["experts"],
        router=parts["router"],
        bypassed=tuple(bypassed),
        aliases=_aliases(parts),
        inspected=True,
        doubts=tuple(doubts),
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules the model says never to split, or else the longest list of modules there is."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    whole = set(getattr(model, "_no_split_modules", None) or ())
    said = [found for found in lists if any(type(layer).__name__ in whole for layer in found)]
    return list(max(said or lists, key=len, default=()))


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """What computes hidden states, without the head."""
    # Llama 4's causal model is its own base by name; its decoder is what `model` holds.
    return model.get_submodule("model") if model.base_model is model else model.base_model


def _roles(layer: nn.Module) -> list[tuple[str, Role | None]]:
    """Each linear module and fused expert tensor of a layer by its name there, and what it belongs to."""
    found: list[tuple[str, Role | None]] = []
    for name, module in layer.named_modules():
        if _is_router(name, module):
            found.append((f"{name}.weight", "router"))
        elif isinstance(module, nn.Linear):
            found.append((name, _linear_role(name)))
        elif "expert" in name or hasattr(module, "num_experts"):
            own = module.named_parameters(recurse=False)
            found += [(f"{name}.{parameter}", "experts") for parameter, tensor in own if tensor.ndim == 3]
    return found


def _is_router(name: str, module: nn.Module) -> bool:
    """It holds a matrix and is called a gate or a router, such as `mlp.gate`, `shared_expert_gate`, TopKRouter."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        return False
    (*parents, last), kind = name.lower().split("."), type(module).__name__.lower()
    if any("router" in part for part in parents) or "router" in kind or "topk" in kind:
        return True
    # A gate that stands in the layer itself is no router (Gemma 4's per_layer_input_gate).
    return last.endswith(("gate", "router")) and bool(parents)


def _linear_role(name: str) -> Role | None:
    *parents, last = name.lower().split(".")
    if any("shared_expert" in part for part in parents):
        return "shared_experts"
    if any("expert" in part for part in parents):
        return "experts"
    if any(word in part for part in parents for word in _MIXERS):
        return "attention"
    if any(word in part for part in parents for word in _MLP_PARENTS) or last in _MLP_NAMES:
        return "mlp"
    return None


def _aliases(parts: dict[Role, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The classic names in this architecture's words, where its own names leave no doubt."""
    means: dict[str, tuple[str, ...]] = {}
    attention = {name.rpartition(".")[2]: name for name in parts["attention"]}
    if "q_proj" not in attention and {"q_a_proj", "q_b_proj"} <= set(attention):
        means["q_proj"] = (attention["q_a_proj"], attention["q_b_proj"])
    if {"kv_a_proj_with_mqa", "kv_b_proj"} <= set(attention):
        means["k_proj"] = means["v_proj"] = (attention["kv_a_proj_with_mqa"], attention["kv_b_proj"])
    for fused in _FUSED_QKV:
        if fused in attention and "q_proj" not in attention:
            means["q_proj"] = means["k_proj"] = means["v_proj"] = (attention[fused],)
    dense = (*parts["shared_experts"], *parts["mlp"])
    into = tuple(name for name in parts["experts"] if "down" not in name.rpartition(".")[2])
    out = tuple(name for name in parts["experts"] if name not in into)
    for classic, experts in (("gate_proj", into), ("up_proj", into), ("down_proj", out)):
        own = tuple(name for name in dense if name.endswith(f".{classic}"))
        fused_own = tuple(name for name in dense if name.endswith(".gate_up_proj") and classic != "down_proj")
        if experts or (fused_own and not own):
            means[classic] = (*(own or fused_own), *experts)
    return means
