"""What vLLM and SGLang make of an adapter's files, written anew from their sources.

vllm-project/vllm a014e35f38c8: lora/lora_model.py, lora/model_manager.py, lora/lora_weights.py, lora/peft_helper.py.
sgl-project/sglang cce0a1244b5a: srt/lora/lora.py, srt/lora/mem_pool.py, srt/lora/lora_manager.py.

Both know nothing of the base's parameters but the modules of their own classes; both return the change of each fused
module as the kernels multiply it, and raise where the server would raise or skip a tensor.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}


def read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


def vllm_deltas(
    folder: Path,
    linear: set[str],
    packed: list[str],
    experts: tuple[str, tuple[str, str, str]] | None = None,
    count: int = 0,
    prefixes: dict[str, str] | None = None,
    max_lora_rank: int = 512,
) -> dict[str, Tensor]:
    """By vLLM's module names; experts as (experts, out, in) under `….w13` and `….w2`.

    Args:
        linear: Endings of the linear modules that its class has.
        packed: Keys of its `packed_modules_mapping`.
        experts: Ending of the experts' module and their names of gate, down, up.
        prefixes: Its `hf_to_vllm_mapper`.
    """
    config, tensors = read(folder)
    if config.get("modules_to_save") or config.get("use_dora") or config.get("bias", "none") != "none":
        raise ValueError("refused by PEFTHelper")
    if config["r"] > max_lora_rank:
        raise ValueError("rank")
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    children = {child for key in packed for child in PACKED[key]}
    expected = (linear - set(packed)) | children
    if experts is not None:
        expected |= {f"experts.{i}.{name}" for i in range(count) for name in experts[1]}
    loras: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        assert name.startswith("base_model.model.")
        bare = name.replace("base_model.model.", "")
        for prefix, new in (prefixes or {}).items():
            if bare.startswith(prefix):
                bare = bare.replace(prefix, new, 1)
        parts = bare.split(".")
        if parts[-1] != "weight" or parts[-2] not in ("lora_A", "lora_B"):
            raise ValueError(f"{name} is unsupported LoRA weight")
        module = ".".join(parts[:-2])
        suffix = module[module.find(".experts") + 1 :] if ".experts" in module else parts[-3]
        if suffix not in expected:
            raise ValueError(f"expected target modules in {sorted(expected)[:8]} but received {module}")
        assert tensor.shape[0 if parts[-2] == "lora_A" else 1] <= max_lora_rank
        loras.setdefault(module, {})[parts[-2]] = tensor
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[tuple[int, str], Tensor]] = {}
    for module, pair in loras.items():
        delta = scale * (pair["lora_B"] @ pair["lora_A"])
        expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", module)
        if expert is None:
            found[module] = delta
        else:
            stacks.setdefault(expert[1], {})[int(expert[2]), expert[3]] = delta
    for module, stack in stacks.items():
        assert experts is not None and module.endswith(experts[0])
        gate, down, up = experts[1]
        # pack_moe: every expert needs all three, or an assertion fails.
        found[f"{module}.w13"] = torch.stack([torch.cat([stack[i, gate], stack[i, up]]) for i in range(count)])
        found[f"{module}.w2"] = torch.stack([stack[i, down] for i in range(count)])
    return found


_NORMALIZED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj", "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}  # fmt: skip
_STACKED = {"qkv_proj": 3, "gate_up_proj": 2, "fused_qkv_a_proj_with_mqa": 2}


def sglang_deltas(folder: Path, sizes: dict[str, tuple[int, ...]], count: int = 0) -> dict[tuple[int, str], Tensor]:
    """By layer and SGLang's target name (one module each in a layer); experts as (experts, out, in), `…_moe`.

    Args:
        sizes: Rows of each part of a joined module: `{"qkv_proj": (32, 16, 16)}`.
    """
    config, tensors = read(folder)
    assert isinstance(config["target_modules"], list)
    targets = {_NORMALIZED.get(name.split(".")[-1], name.split(".")[-1]) for name in config["target_modules"]}
    rank, scale = config["r"], config["lora_alpha"] / config["r"]  # rsLoRA is not looked at
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        assert layer is not None
        layers.setdefault(int(layer[1]), {})[name] = tensor
    found: dict[tuple[int, str], Tensor] = {}
    for layer_id, weights in layers.items():
        _join(weights)
        pairs: dict[tuple[str, int | None], dict[str, Tensor]] = {}
        for name, tensor in weights.items():
            matching = [target for target in targets if target in name]
            if not matching:
                raise ValueError(f"skipped: {name}")
            target = max(matching, key=len)
            expert = re.search(r"experts\.(\d+)\.", name)
            side = "A" if "lora_A" in name else "B"
            pair = pairs.setdefault((target, int(expert[1]) if expert else None), {})
            assert side not in pair, f"two tensors of one layer in one buffer: {name}"
            pair[side] = tensor
        for (target, expert_id), pair in pairs.items():
            delta = scale * _product(pair["A"], pair["B"], rank, _STACKED.get(target, 1), sizes.get(target))
            if expert_id is None:
                found[layer_id, target] = delta
            else:
                stack = found.setdefault((layer_id, f"{target}_moe"), torch.full((count, *delta.shape), math.nan))
                stack[expert_id] = delta
    return found


def _join(weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        if "q_proj" in name and "qkv_proj" not in name:
            names = [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
            weights[name.replace("q_proj", "qkv_proj")] = torch.cat([weights.pop(one) for one in names])
        elif "gate_proj" in name:
            names = [name, name.replace("gate_proj", "up_proj")]
            weights[name.replace("gate_proj", "gate_up_proj")] = torch.cat([weights.pop(one) for one in names])
        elif "q_a_proj" in name:
            names = [name, name.replace("q_a_proj", "kv_a_proj_with_mqa")]
            fused = name.replace("q_a_proj", "fused_qkv_a_proj_with_mqa")
            weights[fused] = torch.cat([weights.pop(one) for one in names])


def _product(a: Tensor, b: Tensor, rank: int, parts: int, sizes: tuple[int, ...] | None) -> Tensor:
    """A holds the parts' factors above each other, B their rows."""
    assert a.shape[0] == rank * parts and b.shape[1] == rank
    rows = sizes or (b.shape[0] // parts,) * parts
    assert sum(rows) == b.shape[0]
    return torch.cat([one @ a[i * rank : (i + 1) * rank] for i, one in enumerate(b.split(rows))])
