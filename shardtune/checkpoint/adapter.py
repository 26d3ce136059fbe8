"""How does a sharded adapter become a standard PEFT folder, and come back? Only what trains is ever gathered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from shardtune.errors import ShardtuneError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

WEIGHTS = "adapter_model.safetensors"


def gather_adapter(model: PeftModel) -> dict[str, torch.Tensor]:
    """The trainable tensors, whole, on the CPU, by PEFT's names. A collective: every rank calls it and gets them.

    Gathers megabytes where a full state dict would gather the frozen base as well (238 GB at 119B parameters).
    """
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    # PEFT's own renaming, so that whatever loads a PEFT adapter loads this one.
    return get_peft_model_state_dict(model, state_dict=whole, save_embedding_layers=False)  # type: ignore[no-any-return]


def write_adapter(model: PeftModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` into `folder` (one process only)."""
    write_tensors(tensors, model.peft_config["default"], folder)


def write_tensors(tensors: dict[str, torch.Tensor], config: PeftConfig, folder: Path) -> None:
    """Write an adapter's tensors and its config, as whatever loads PEFT adapters expects them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors 0.8 writes 0600: other users of a shared volume could not read it
    was_inference, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = was_inference


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter folder, by PEFT's names."""
    return load_file(folder / WEIGHTS)


def put_adapter(model: PeftModel, tensors: dict[str, torch.Tensor]) -> None:
    """Put whole tensors (as `read_adapter` gives them, the same on every rank) into a sharded model.

    Raises:
        ShardtuneError: a tensor of the model is missing, has another shape, or one is there that the model has not.
    """
    trainable = {_disk_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if set(tensors) != set(trainable):
        missing, surplus = sorted(set(trainable) - set(tensors)), sorted(set(tensors) - set(trainable))
        raise ShardtuneError(
            "The adapter does not fit the model.",
            why=f"Missing: {missing[:3] or 'none'}; unknown: {surplus[:3] or 'none'}.",
            fix="Load it with the lora settings it was trained with.",
        )
    other = [name for name, p in trainable.items() if tensors[name].shape != p.shape]
    if other:  # copying would stretch an adapter of rank 1 over any rank
        name = other[0]
        raise ShardtuneError(
            "The adapter does not fit the model.",
            why=f"{len(other)} tensors have another shape, such as {name}: {list(tensors[name].shape)} instead of "
            f"{list(trainable[name].shape)}.",
            fix="Load it with the lora settings it was trained with.",
        )
    with torch.no_grad():
        for name, parameter in trainable.items():
            value = tensors[name].to(parameter.dtype)
            if isinstance(parameter, DTensor):
                value = value.to(parameter.to_local().device)
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def _disk_name(name: str) -> str:
    return name.replace(".default.", ".").removesuffix(".default")
