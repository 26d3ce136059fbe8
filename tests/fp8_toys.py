"""Toys rewritten as FP8 checkpoints, in the forms that are released."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = (16, 16)


def quantise(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales as stored, and the values they stand for, computed by hand: element by element, in float32."""
    rows, columns = weight.shape[-2:]
    block = {"blocks": BLOCK, "rows": (1, columns)}.get(form, (rows, columns))
    grid = (*weight.shape[:-2], math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    scale = torch.rand(grid) * 0.01 + 0.001
    expanded = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    codes = (weight / expanded).clamp(-448, 448).to(torch.float8_e4m3fn)
    if form == "scalar" and weight.dim() == 2:
        stored = scale.reshape(())
    elif form == "scalar":
        stored = scale.reshape(-1)  # one per expert
    else:
        stored = scale.reshape(1) if form == "one" and weight.dim() == 2 else scale
    return codes, stored, codes.float() * expanded


def to_fp8(folder: Path, form: str, block: tuple[int, int] | None = BLOCK) -> dict[str, torch.Tensor]:
    """Rewrite a toy's linear and expert weights in float8; returns the true values by stored name."""
    torch.manual_seed(1)
    file = folder / "model.safetensors"
    written, values = {}, {}
    for name, tensor in load_file(file).items():
        values[name] = tensor
        if (tensor.dim() >= 2 and "_proj" in name) or ".experts." in name:
            codes, scale, values[name] = quantise(tensor, form)
            written |= {name: codes, f"{name}_scale_inv": scale}
            owner = name.removesuffix(".weight")
            written[f"{owner}{'.' if owner != name else '_'}activation_scale"] = torch.tensor(1.0)
        else:
            written[name] = tensor
    save_file(written, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block and list(block)}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    return values
