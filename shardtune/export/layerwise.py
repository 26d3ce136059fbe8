"""How does a model compute that does not fit into memory? One decoder layer at a time, read when it is its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardtune.model.experts import use_expert_loops
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import is_adapter, load_shards, local_shards, materialize, unwrapped_name
from shardtune.model.weight_mapping import WeightMapping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Called after each layer with its number, its module (its weights are still there), its inputs and its output.
AfterLayer = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


@dataclass(frozen=True)
class _Place:
    """A parameter of a layer: on the meta device between its layer's turns."""

    owner: nn.Module
    attribute: str
    name: str
    meta: nn.Parameter


class LayerwiseModel:
    """A model of which embedding, head and adapters are in memory, and one decoder layer.

    Args:
        model: On the meta device: `base`, or what PEFT made of it.
        rounded_to: By parameter, the dtype that its values are rounded to when they are read.
    """

    def __init__(
        self,
        model: nn.Module,
        base: PreTrainedModel,
        mapping: WeightMapping,
        device: torch.device,
        rounded_to: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.model, self.base, self.mapping, self.device = model, base, mapping, device
        self.rounded_to = rounded_to or {}
        if model is base:
            base.requires_grad_(False)  # what trains comes with the adapter and stays in memory
        self.layers = decoder_layers(base)
        names = {id(p): unwrapped_name(name) for name, p in model.named_parameters() if not is_adapter(name)}
        self.places = [_places(layer, names, mapping) for _, layer in self.layers]

    @property
    def layer_bytes(self) -> list[int]:
        """What is read for each layer."""
        return [sum(place.meta.nbytes for place in places) for places in self.places]

    @property
    def nbytes(self) -> int:
        """What is held at the most."""
        layers = self.layer_bytes
        whole = sum(parameter.nbytes for parameter in self.model.parameters())
        return whole - sum(layers) + max(layers, default=0)

    @torch.no_grad()
    def load(self) -> None:
        """Read what stays. Adapters get memory, and no values."""
        left_out = [place.meta for places in self.places for place in places]
        materialize(self.model, self.base, self.device, left_out=left_out)
        with ShardReader(self.mapping) as reader:
            own = [shard for shard in local_shards(self.model, self.mapping) if not shard.into.is_meta]
            load_shards(own, reader)
            for shard in own:
                self._round(shard.name, shard.into)
        self.model.eval()
        use_expert_loops(self.base, compiled=False)
        self.base.config.use_cache = False

    @torch.no_grad()
    def logits(self, ids: Tensor, after_layer: AfterLayer | None = None) -> Tensor:
        """Of a batch, on the CPU in float32. Every layer is read once."""
        with ShardReader(self.mapping) as reader:
            hooks = []
            for number, (_, layer) in enumerate(self.layers):
                before, after = self._hooks(number, reader, after_layer)
                hooks.append(layer.register_forward_pre_hook(before))
                hooks.append(layer.register_forward_hook(after, with_kwargs=True, always_call=True))
            try:
                found: Tensor = self.model(input_ids=ids.to(self.device), use_cache=False).logits
            finally:
                for hook in hooks:
                    hook.remove()
        return found.float().cpu()

    def _hooks(
        self, number: int, reader: ShardReader, after_layer: AfterLayer | None
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        places = self.places[number]

        def before(layer: nn.Module, args: Any) -> None:
            jobs, read = [], []
            for place in places:
                into = torch.empty_like(place.meta, device=self.device)
                place.owner._parameters[place.attribute] = nn.Parameter(into, requires_grad=False)
                jobs += reader.jobs(place.name, (0, into.shape[0] if into.dim() else 1), into)
                read.append((place.name, into))
            reader.run(jobs)
            for name, into in read:
                self._round(name, into)

        def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            try:
                if after_layer is not None and output is not None:
                    after_layer(number, layer, args, kwargs, output)
            finally:
                for place in places:
                    place.owner._parameters[place.attribute] = place.meta

        return before, after

    def _round(self, name: str, values: Tensor) -> None:
        dtype = self.rounded_to.get(name)
        if dtype is not None and dtype.itemsize < values.dtype.itemsize:
            for part in values.view(-1).split(1 << 24):
                part.copy_(part.to(dtype))


def decoder_layers(base: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The modules that transformers does not split, in the order they compute; none within another."""
    kinds = set(getattr(base, "_no_split_modules", None) or ())
    found: list[tuple[str, nn.Module]] = []
    for name, module in base.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if type(module).__name__ in kinds and not inside:
            found.append((name, module))
    return found


def _places(layer: nn.Module, names: Mapping[int, str], mapping: WeightMapping) -> list[_Place]:
    """The layer's frozen parameters that are in the checkpoint. What trains in full comes with the adapter."""
    return [
        _Place(owner, attribute, names[id(parameter)], parameter)
        for owner in layer.modules()
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
        and not parameter.requires_grad
        and id(parameter) in names
        and names[id(parameter)] in mapping.pieces
    ]
