"""How does a sharded adapter become a standard PEFT folder, and come back? Only what trains is ever gathered."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from shardtune.durable import library_os_errors
from shardtune.errors import ShardtuneError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

WEIGHTS = "adapter_model.safetensors"


class AdapterMismatchError(ShardtuneError):
    """Tensors of other names or shapes than what the model trains."""


def gather_adapter(model: PeftModel, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """The trainable tensors, whole, copied to the CPU, by PEFT's names. A collective: every rank calls it.

    Gathers megabytes where a full state dict would gather the frozen base as well (238 GB at 119B parameters).

    Args:
        keep: False on ranks that only take part: they get nothing, and hold no more than one tensor at a time.
    """
    whole = gather_tensors(((name, p) for name, p in model.named_parameters() if p.requires_grad), keep=keep)
    return _by_disk_name(model, whole) if keep else {}


def _by_disk_name(model: PeftModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's own renaming, so that whatever loads a PEFT adapter loads this one."""
    return get_peft_model_state_dict(model, state_dict=tensors, save_embedding_layers=False)  # type: ignore[no-any-return]


def gather_tensors(named: Iterable[tuple[str, torch.Tensor]], *, keep: bool) -> dict[str, torch.Tensor]:
    """Sharded tensors made whole, one after the other, and copied to the CPU where they are kept.

    Always a copy: with one process on a CPU the whole is the parameter itself, and training goes on.
    """
    found = {}
    for name, tensor in named:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.detach().to("cpu", copy=True).contiguous()
    return found


def inference_config(model: PeftModel) -> PeftConfig:
    """A copy of the adapter's settings as they are written: ready for use, not for training."""
    config = copy.deepcopy(model.peft_config["default"])
    config.inference_mode = True
    return config


def write_adapter(model: PeftModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` into `folder` (one process only)."""
    write_adapter_files(inference_config(model), tensors, folder)


def write_adapter_files(config: PeftConfig, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """The same where the model is not at hand (a thread that writes while training goes on)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, tensors)
    config.save_pretrained(folder)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one safetensors file, mode 0644.

    Raises:
        OSError: the disk is full, or any other thing the system says (the library wraps it in an error of its own).
    """
    with library_os_errors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors 0.8 writes 0600: other users of a shared volume could not read it


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter folder, by PEFT's names."""
    return load_file(folder / WEIGHTS)


def load_adapter(model: PeftModel, tensors: dict[str, torch.Tensor]) -> None:
    """Put whole tensors (as `read_adapter` gives them, the same on every rank) into a sharded model.

    Raises:
        AdapterMismatchError: as `check_adapter_matches` does.
    """
    check_adapter_matches(model, tensors)
    with torch.no_grad():
        for name, parameter in _trainable(model).items():
            parameter.copy_(shard_like(tensors[name].to(parameter.dtype), parameter))


def check_adapter_matches(model: PeftModel, tensors: dict[str, torch.Tensor]) -> None:
    """Raises:
    AdapterMismatchError: a tensor of the model is missing, has another shape, or one is there that the model has not.
    """
    trainable = _trainable(model)
    why = ""
    if set(tensors) != set(trainable):
        missing, surplus = sorted(set(trainable) - set(tensors)), sorted(set(tensors) - set(trainable))
        why = f"Missing: {missing[:3] or 'none'}; unknown: {surplus[:3] or 'none'}."
    else:  # copying would stretch an adapter of rank 1 over any rank
        other = [name for name, p in trainable.items() if tensors[name].shape != p.shape]
        if other:
            shapes = f"{list(tensors[other[0]].shape)} instead of {list(trainable[other[0]].shape)}"
            why = f"{len(other)} tensors have another shape, such as {other[0]}: {shapes}."
    if why:
        raise AdapterMismatchError(
            "The adapter does not fit the model.", why=why, fix="Load it with the lora settings it was trained with."
        )


def _trainable(model: PeftModel) -> dict[str, torch.Tensor]:
    return _by_disk_name(model, {name: p for name, p in model.named_parameters() if p.requires_grad})


def shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, laid out as `parameter` is. A collective: rank 0's content counts.

    Elsewhere a tensor on `meta` will do, so that one process has to have read it.
    """
    if whole.is_meta:
        whole = torch.empty(whole.shape, dtype=whole.dtype)
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    whole = whole.to(parameter.to_local().device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
