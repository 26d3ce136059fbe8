"""What do the adapters start from? Values drawn from the seed by name: the same on every rank, however many."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from shardtune.errors import ShardtuneError
from shardtune.model.weight_loading import local_rows

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.model.new_tokens import NewTokens

_PIECE = 4096  # rows that are summed at once


def init_adapters(model: PeftModel, seed: int) -> str:
    """Fill the adapters of a model whose memory holds nothing yet; returns a fingerprint of all values.

    As PEFT does: A uniform within ±1/√fan-in (kaiming_uniform with a = √5), or normal (`gaussian`), B zero, DoRA's
    magnitudes as long as the rows of the weight (which has to be there). Each tensor has a generator of its own, seeded
    with the run's seed and its name, so that neither the order of modules nor the sharding matters. Every rank draws a
    whole tensor and keeps its slice; the largest (all experts of a layer) is some tens of megabytes.
    """
    fingerprint = hashlib.sha256()
    _init_dora_magnitudes(model)
    gaussian = model.peft_config["default"].init_lora_weights == "gaussian"
    ranks = {
        f"{name}.lora_A.default.weight": layer.r["default"]
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            whole = torch.empty(parameter.shape)
            if gaussian:
                whole.normal_(std=1 / ranks[name], generator=_generator(seed, name))
            else:
                bound = 1 / math.sqrt(parameter.shape[1])
                whole.uniform_(-bound, bound, generator=_generator(seed, name))
        elif ".lora_B." in name:
            whole = torch.zeros(parameter.shape)
        elif "lora_" in name and ".lora_magnitude_vector." not in name:
            raise ShardtuneError(f"'{name}' is an adapter that is not initialised here.", fix="Please report this.")
        else:
            continue
        fingerprint.update(name.encode())
        fingerprint.update(whole.numpy().tobytes() if ".lora_A." in name else b"")
        _put(whole, parameter)
    return fingerprint.hexdigest()


def init_new_tokens(model: PeftModel, new: NewTokens, group: dist.ProcessGroup) -> None:
    """Give the rows of new tokens their first values, in a model whose weights are there. A collective.

    A token that the model does not know starts as the mean of those it does (as transformers does it): neither
    likelier nor stranger than any other. One that it knows starts from its own row. No rank needs more of the
    embedding than it holds.

    Args:
        group: Of all ranks, for tensors on the CPU.
    """
    for layer in model.modules():
        if not isinstance(layer, TrainableTokensLayer) or layer.tied_adapter is not None:
            continue  # a tied head has the embedding's
        (first, end), local = local_rows(layer.base_layer.weight)
        # With the number of rows in a last column: replicas hold the same ones. Exact enough for any world size.
        sums = torch.zeros(1 + len(new.ids), local.shape[1] + 1, dtype=torch.float64)
        for part in local[: max(0, new.known - first)].split(_PIECE):
            sums[0, :-1] += part.double().sum(dim=0).cpu()
            sums[0, -1] += len(part)
        for index, (token, number) in enumerate(new.numbers.items(), start=1):
            if first <= number < end and not new.is_unknown(token):
                sums[index, :-1] = local[number - first].double()
                sums[index, -1] = 1
        dist.all_reduce(sums, group=group)
        means = (sums[:, :-1] / sums[:, -1:].clamp(min=1)).float()
        mean, rows = means[0], means[1:]
        rows[[new.is_unknown(token) for token in new.numbers]] = mean
        local[max(0, new.stored - first) :] = mean.to(local)  # rows that no file has
        _put(rows, layer.trainable_tokens_delta["default"])


def _init_dora_magnitudes(model: PeftModel) -> None:
    """DoRA begins as the model is: B is zero, so W + B·A is W. Magnitudes are sharded as the rows of W are, or further,
    so each rank has what it needs. The norm is taken as PEFT's forward takes it, so that the two cancel."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and layer.lora_magnitude_vector:
            (start, _), weight = local_rows(layer.get_base_layer().weight)
            (first, end), magnitude = local_rows(layer.lora_magnitude_vector["default"].weight)
            magnitude.copy_(torch.linalg.norm(weight[first - start : end - start], dim=1))


def _put(whole: Tensor, parameter: Tensor) -> None:
    """Every rank has the whole and keeps its part."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            whole = whole.to(parameter.to_local().device)
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
