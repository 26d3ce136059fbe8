"""What in a model could take an adapter? Its linear modules, fused expert tensors and routers, each with its role."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardtune.errors import UserInputError
from shardtune.model.families.family import Family

if TYPE_CHECKING:
    from shardtune.model.outline import Outline

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


def sites_of(outline: Outline) -> dict[str, Site]:
    """Every site by name, in the model's order.

    The output head is none, and what the family calls `bypassed`: their weights are multiplied with directly.
    """
    roles = _roles(outline.family)
    found: dict[str, Site] = {}
    for parameter, shape in outline.parameters.items():
        module = parameter.rpartition(".")[0]
        _, below = outline.below_layer(parameter)
        _, module_below = outline.below_layer(module)
        if module == outline.head or module_below in outline.family.bypassed:
            continue
        # A router may be a subclass of nn.Linear (Llama 4's): it is adapted by its weight, never as a linear module.
        if below in roles:
            found[parameter] = Site(parameter, roles[below], shape, is_parameter=True, below=below)
        elif module in outline.linear and parameter.endswith(".weight"):
            role = roles.get(module_below, "other")
            found[module] = Site(module, role, shape, is_parameter=False, below=module_below)
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
