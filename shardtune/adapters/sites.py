"""What in a model could take an adapter? Its linear modules, fused expert tensors and routers, each with its role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from shardtune.errors import UserInputError
from shardtune.model.families.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Role = Literal["attention", "mlp", "shared-experts", "experts", "router", "other"]
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class Site:
    """One place for an adapter.

    Args:
        name: Full name of the module, or of the parameter where it is one (fused experts, routers).
        role: What the family says it is; `other` is outside the decoder layers, or unknown to the family.
        shape: (out, in) of a matrix, (experts, out, in) of a fused tensor.
        below: Its name below the decoder layer; empty outside of one.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    is_parameter: bool
    below: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be called: a router by its module as well as by its weight."""
        return (self.name.removesuffix(".weight"), self.name) if self.role == "router" else (self.name,)

    @property
    def layer(self) -> int | None:
        """The number of its decoder layer; None outside of one."""
        number = self.name.removesuffix(f".{self.below}").rpartition(".")[2] if self.below else ""
        return int(number) if number.isdigit() else None

    @property
    def size(self) -> int:
        """How many weights an adapter here sits on."""
        total = 1
        for side in self.shape:
            total *= side
        return total

    @property
    def largest_rank(self) -> int:
        """Beyond the smaller side of the matrix a rank adds nothing."""
        return min(self.shape[-2:])


def sites_of(model: PreTrainedModel, family: Family) -> dict[str, Site]:
    """Every site by name, in the model's order.

    The output head is none, and what the family calls `bypassed`: their weights are multiplied with directly.
    """
    layer_class = family.decoder_layer.get(model.config.model_type, "")
    prefixes = [name for name, module in model.named_modules() if name and type(module).__name__ == layer_class]
    roles = _roles(family)
    head = model.get_output_embeddings()
    found: dict[str, Site] = {}
    for name, module in model.named_modules():
        prefix = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), "")
        below = name.removeprefix(f"{prefix}.") if prefix else ""
        for site in _sites(name, below, module, roles):
            if module is not head and below not in family.bypassed:
                found[site.name] = site
    return found


def _roles(family: Family) -> dict[str, Role]:
    parts: dict[Role, tuple[str, ...]] = {
        "attention": family.attention,
        "mlp": family.mlp,
        "shared-experts": family.shared_experts,
        "experts": family.experts,
        "router": family.router,
    }
    return {name: role for role, names in parts.items() for name in names}


def _sites(name: str, below: str, module: nn.Module, roles: dict[str, Role]) -> Iterator[Site]:
    named: dict[str, Role] = {}
    for parameter, _ in module.named_parameters(recurse=False):
        role = roles.get(f"{below}.{parameter}") if below else None
        if role is not None:
            named[parameter] = role
    for parameter, role in named.items():
        shape = tuple(module.get_parameter(parameter).shape)
        yield Site(f"{name}.{parameter}", role, shape, is_parameter=True, below=f"{below}.{parameter}")
    # A router may be a subclass of nn.Linear (Llama 4's): it is adapted by its weight, never as a linear module.
    if isinstance(module, nn.Linear) and not named:
        shape = (module.out_features, module.in_features)
        yield Site(name, roles.get(below, "other") if below else "other", shape, is_parameter=False, below=below)


def matches(pattern: str, name: str) -> bool:
    """Does a name (by its whole last parts) or a regular expression (all of it) match a full name?

    Raises:
        UserInputError: the pattern is neither.
    """
    if _PLAIN_NAME.fullmatch(pattern):
        return name == pattern or name.endswith(f".{pattern}")
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UserInputError(
            f"lora.target_modules: '{pattern}' is not a valid regular expression.",
            why=str(error),
            fix="Use a module name such as q_proj, or a pattern over full names such as .*self_attn.*proj.",
        ) from error
