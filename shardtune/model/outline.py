"""What is the model made of? Names and shapes of its parameters, from config.json and safetensors headers. No torch.

`model_outline.outline_of` tells the same of a model that was built; whoever asks either cannot tell them apart.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from shardtune.errors import UserInputError
from shardtune.model.families.family import Family
from shardtune.model.families.registry import family_for
from shardtune.model.stored_names import TextTensors, text_tensors
from shardtune.model.text_config import EXPERT_COUNTS, held_dtype, text_config
from shardtune.model.unsuitable import quantisation

if TYPE_CHECKING:
    from pathlib import Path

    from shardtune.config.schema import ModelSection
    from shardtune.model.safetensors_headers import StoredTensor

Shape = tuple[int, ...]
# usual: can be computed beside the fused loss; own: in a way that only the model's forward knows.
RouterLoss = Literal["none", "usual", "own"]
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# One tensor per expert, under the names of Mixtral and of all others; transformers fuses them when it loads.
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = {
    "gate_proj": "gate_up_proj", "w1": "gate_up_proj", "up_proj": "gate_up_proj", "w3": "gate_up_proj",
    "down_proj": "down_proj", "w2": "down_proj",
}  # fmt: skip
# Heads for several tokens at once, vision towers, and what is computed anew: transformers leaves them out as well.
_NOT_LOADED = re.compile(r"^(mtp|model\.visual)\.|rotary_emb\.inv_freq$")


class NeedsTorch(UserInputError):
    """The model cannot be described without building it; with torch it can (`meta_model.build_meta_model`)."""


@dataclass(frozen=True)
class Outline:
    """A text model before anything is done to it.

    Attributes:
        config: config.json's keys for the text model, with transformers' defaults.
        dtype: What the weights are built in: model.torch_dtype, or the checkpoint's own.
        parameters: Shapes by name, as transformers names them; tied ones once.
        quantised: Those that the checkpoint stores in float8.
        linear: Names of linear modules.
        layers: Names of the decoder layers.
        embedding, head: Names of these modules; empty where there is none.
        modules: Class of each module by name; empty where the model was not built.
        own_attention: The attention code that transformers chooses.
        expert_obstacle: Why the routed experts can neither be adapted nor held in float8; None = they can.
    """

    family: Family
    model_type: str
    model_class: str
    config: Mapping[str, Any]
    dtype: str
    parameters: Mapping[str, Shape]
    quantised: frozenset[str]
    linear: frozenset[str]
    layers: tuple[str, ...]
    embedding: str
    head: str
    modules: Mapping[str, str]
    own_attention: str
    router_loss: RouterLoss
    expert_obstacle: str | None

    @property
    def layer_class(self) -> str | None:
        """The class that is sharded layer by layer, where the family knows it."""
        return self.family.decoder_layer.get(self.model_type)

    @property
    def size(self) -> int:
        return sum(map(prod, self.parameters.values()))

    @property
    def tied(self) -> bool:
        """Embedding and head are one matrix."""
        return bool(self.config.get("tie_word_embeddings"))

    @cached_property
    def owners(self) -> dict[str, dict[str, Shape]]:
        """Of each module that holds parameters itself, their shapes by name there."""
        found: dict[str, dict[str, Shape]] = defaultdict(dict)
        for name, shape in self.parameters.items():
            owner, _, own = name.rpartition(".")
            found[owner][own] = shape
        return dict(found)

    def below_layer(self, name: str) -> tuple[str, str]:
        """The decoder layer that holds a module or parameter, and its name below it; both empty outside of one."""
        layer = next((layer for layer in self._prefixes(name) if layer in self._layer_names), "")
        return layer, name.removeprefix(f"{layer}.") if layer else ""

    @cached_property
    def _layer_names(self) -> frozenset[str]:
        return frozenset(self.layers)

    @staticmethod
    def _prefixes(name: str) -> Iterable[str]:
        parts = name.split(".")
        return (".".join(parts[:count]) for count in range(1, len(parts)))


def read_outline(section: ModelSection, folder: Path, stored: Mapping[str, StoredTensor]) -> Outline:
    """The text model that `folder`'s config.json and the headers of its weights describe.

    Raises:
        NeedsTorch: it has no family file, comes with code of its own, or has no stored weights.
        UserInputError: it is quantised in a way that is not read, or layers are missing.
    """
    name = section.model_name_or_path
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantisation(name, raw)
    wrapper, config = text_config(name, raw)
    kind = str(config.get("model_type"))
    family = family_for(kind)
    if family is None:
        raise _needs_torch(name, f"There is no family file for {kind} (docs/families.md).")
    if section.trust_remote_code:
        raise _needs_torch(name, "model.trust_remote_code: its own code says what it is made of.")
    if section.weights == "random":
        raise _needs_torch(name, "model.weights is random: there are no stored weights whose shapes could be read.")
    prefixes = wrapper.stored if wrapper is not None else None
    tensors = text_tensors(stored, prefixes, section.ignore_tensors)
    parameters, quantised = _parameters(name, tensors, family, config)
    linear = {
        owner for owner in (parameter.removesuffix(".weight") for parameter in parameters)
        if owner in family.outside or _below(owner) in _linear_names(family)
    }  # fmt: skip
    return Outline(
        family=family,
        model_type=kind,
        model_class=family.causal_lm[kind],
        config=config,
        dtype=held_dtype(section, config["dtype"], stored),
        parameters=parameters,
        quantised=quantised,
        linear=frozenset({*linear, HEAD}),
        layers=tuple(f"model.layers.{number}" for number in range(config["num_hidden_layers"])),
        embedding=EMBEDDING,
        head=HEAD,
        modules={},
        own_attention=family.own_attention,
        router_loss="usual" if family.router_loss else "none",
        expert_obstacle=family.unsupported.get("fused_experts"),
    )


def _needs_torch(name: str, why: str) -> NeedsTorch:
    return NeedsTorch(
        f"'{name}' cannot be described from its files alone.",
        why=why,
        fix="With --exact it is built without its weights; that needs torch and transformers.",
    )


def _parameters(
    name: str, tensors: TextTensors, family: Family, config: Mapping[str, Any]
) -> tuple[dict[str, Shape], frozenset[str]]:
    """Shapes by parameter, and which of them are stored in float8 as a whole."""
    pieces: dict[str, list[tuple[str, Shape, bool]]] = defaultdict(list)
    for stored, tensor in tensors.weights.items():
        target, part = _target(stored)
        if not _is_left_out(target, family, config):
            pieces[target].append((part, tensor.shape, stored in tensors.scales))
    if config.get("tie_word_embeddings"):
        head = pieces.pop(f"{HEAD}.weight", None)
        if head is not None:
            pieces.setdefault(f"{EMBEDDING}.weight", head)
    shapes = {target: _joined(name, target, pieces[target], config) for target in sorted(pieces, key=_natural_key)}
    _refuse_misfit(name, shapes, family, config)
    return shapes, frozenset(target for target, found in pieces.items() if all(scaled for _, _, scaled in found))


def _target(stored: str) -> tuple[str, str]:
    """The parameter that a stored tensor is a part of, and which part; empty = all of it."""
    name = stored.replace(".block_sparse_moe.", ".mlp.")
    if name.startswith("model.language_model."):  # of a text model that was saved inside its wrapper
        name = "model." + name.removeprefix("model.language_model.")
    expert = _EXPERT.fullmatch(name)
    return (f"{expert[1]}.{_FUSED[expert[3]]}", expert[3]) if expert else (name, "")


def _is_left_out(name: str, family: Family, config: Mapping[str, Any]) -> bool:
    """What transformers does not load, and what it loads into buffers."""
    if _NOT_LOADED.search(name):
        return True
    layer = _LAYER.fullmatch(name)
    return layer is not None and (int(layer[1]) >= config["num_hidden_layers"] or layer[2] in family.buffers)


def _joined(model: str, target: str, pieces: list[tuple[str, Shape, bool]], config: Mapping[str, Any]) -> Shape:
    """The shape of a parameter that is stored in one piece, or of experts stored one by one: gate above up."""
    if [part for part, _, _ in pieces] == [""]:
        return pieces[0][1]
    by_part: dict[str, list[Shape]] = defaultdict(list)
    for part, shape, _ in pieces:
        by_part[part].append(shape)
    counts, shapes = {len(found) for found in by_part.values()}, {shape for _, shape, _ in pieces}
    whole = "" not in by_part and len(by_part) == (2 if target.endswith("gate_up_proj") else 1)
    if (
        not whole
        or counts != {config[name] for name in EXPERT_COUNTS if name in config}
        or [len(shape) for shape in shapes] != [2]
    ):
        raise UserInputError(
            f"The experts of '{model}' are incomplete: {target} is stored in {len(pieces)} tensors that do not fit "
            "together.",
            fix="Copy or download the checkpoint again.",
        )
    rows, columns = shapes.pop()
    return counts.pop(), rows * len(by_part), columns


def _refuse_misfit(name: str, shapes: Mapping[str, Shape], family: Family, config: Mapping[str, Any]) -> None:
    known = _linear_names(family) | {router.removesuffix(".weight") for router in family.router}
    numbers: set[int] = set()
    for parameter, shape in shapes.items():
        layer = _LAYER.fullmatch(parameter)
        if layer is not None:
            numbers.add(int(layer[1]))
        unknown = layer is None and not parameter.startswith(("model.", f"{HEAD}."))
        if layer is not None and len(shape) == 2 and layer[2].endswith(".weight"):
            unknown = layer[2].removesuffix(".weight") not in known
        if unknown:
            raise _needs_torch(name, f"It has {parameter}, of which the family file of {family.name} says nothing.")
    missing = set(range(config["num_hidden_layers"])) - numbers
    tops = [EMBEDDING] if config.get("tie_word_embeddings") else [EMBEDDING, HEAD]
    lacks = [f"model.layers.{number}" for number in sorted(missing)]
    lacks += [top for top in tops if f"{top}.weight" not in shapes]
    if lacks:
        raise UserInputError(
            f"Parameters of {family.causal_lm[config['model_type']]} are missing from the checkpoint '{name}': "
            f"{', '.join(lacks[:5])}{' and more' if len(lacks) > 5 else ''}.",
            fix="Set model.model_name_or_path to a checkpoint whose weights match its config.json.",
        )


def _linear_names(family: Family) -> set[str]:
    """Linear modules of a decoder layer, by their names there."""
    return {*family.attention, *family.mlp, *family.shared_experts, *family.other, *family.bypassed}


def _below(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    return layer[2] if layer is not None else ""


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
