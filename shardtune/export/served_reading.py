"""What does a server compute with an adapter's file? Read back by names alone, as its loader does."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shardtune.checkpoint.adapter import WEIGHTS
from shardtune.errors import ShardtuneError
from shardtune.export.served_factors import DOWN, GATE_UP, LAYER
from shardtune.export.served_models import Experts

Pair = tuple[Tensor, Tensor]  # A and B
_MODULE = re.compile(r"base_model\.model\.(?P<module>.+?)(?:\.(?P<expert>\d+)\.(?P<projection>[^.]+))?")


def read_changes(
    folder: Path, names: Mapping[str, tuple[int, ...]], prefixes: Mapping[str, str], experts: Experts | None
) -> dict[str, Pair]:
    """A and B of each of the base's parameters that has an adapter; of gate_up_proj with B in two diagonal blocks.

    Args:
        names: The base's parameters.
        prefixes: Prefix of the text model's names → that of the model that is served.

    Raises:
        ShardtuneError: a name that no server knows, or half of something.
    """
    sides: dict[str, dict[str, Tensor]] = defaultdict(dict)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - a file, not a mapping
            module, _, side = name.removesuffix(".weight").rpartition(".lora_")
            sides[module][side] = file.get_tensor(name)
    found: dict[str, Pair] = {}
    stacks: dict[str, dict[int, dict[str, Pair]]] = defaultdict(lambda: defaultdict(dict))
    for module, pair in sides.items():
        place = _MODULE.fullmatch(module)
        if place is None or set(pair) != {"A", "B"}:
            raise wrong(f"'{module}' is not the name of a module with A and B")
        text = _text_name(place["module"], prefixes)
        if place["expert"] is None:
            found[f"{text}.weight"] = (pair["A"], pair["B"])
        else:
            stacks[text][int(place["expert"])][place["projection"]] = (pair["A"], pair["B"])
    for block, stack in stacks.items():
        found |= _fused(block, stack, names, experts)
    return found


def _text_name(served: str, prefixes: Mapping[str, str]) -> str:
    for text, whole in prefixes.items():
        if served.startswith(whole):
            return text + served.removeprefix(whole)
    return served


def _fused(
    block: str, stack: Mapping[int, Mapping[str, Pair]], names: Mapping[str, tuple[int, ...]], experts: Experts | None
) -> dict[str, Pair]:
    layer = LAYER.match(block)
    if experts is None or layer is None or sorted(stack) != list(range(len(stack))):
        raise wrong(f"'{block}' has {len(stack)} experts")
    if any(set(one) != set(experts.projections) for one in stack.values()):
        raise wrong(f"an expert of '{block}' has no gate, up or down")
    gate, up, down = (
        tuple(torch.stack([stack[expert][projection][side] for expert in range(len(stack))]) for side in (0, 1))
        for projection in experts.projections
    )
    head = f"model.layers.{layer['layer']}."
    name = next(name for name in names if name.startswith(head) and name.endswith(GATE_UP))
    zeros = torch.zeros_like(gate[1])
    b = torch.cat([torch.cat([gate[1], zeros], dim=2), torch.cat([zeros, up[1]], dim=2)], dim=1)
    return {
        name: (torch.cat([gate[0], up[0]], dim=1), b),
        name.removesuffix(GATE_UP) + DOWN: (down[0], down[1]),
    }


def wrong(what: str) -> ShardtuneError:
    return ShardtuneError(
        f"The adapter that was written is not the one that was trained: {what}.",
        why="It was read back name by name before it was published; nothing was.",
        fix="Please report this with the model's config.json and adapter_config.json.",
    )
