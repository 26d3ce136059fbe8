"""What does docs/families.md say? The families' own facts, as a page: `python -m shardtune.model.families.page`."""

from __future__ import annotations

from collections.abc import Iterator

from shardtune.model.families.family import Family
from shardtune.model.families.registry import families

_HEAD = """\
# Model families

Generated from `shardtune/model/families/` by `make reference`. One file there states what is known about an
architecture; `lora.target_modules` ([LoRA targets](targets.md)), loading and sharding use it. Names are relative to a
decoder layer. An architecture without a file is inspected when it is loaded, and the run prints the result; adding a
family takes one file and one test.
"""


def families_page() -> str:
    """docs/families.md."""
    return _HEAD + "".join(f"\n{_section(family)}" for family in families())


def _section(family: Family) -> str:
    lines = [f"## {family.name}", "", "| | |", "|---|---|"]
    lines += [f"| {label} | {text} |" for label, text in _rows(family)]
    if family.pitfalls:
        lines += ["", "Pitfalls:", "", *(f"- {pitfall}" for pitfall in family.pitfalls)]
    return "\n".join(lines) + "\n"


def _rows(family: Family) -> Iterator[tuple[str, str]]:
    for model_type in family.model_types:
        trained, layer = family.causal_lm[model_type], family.decoder_layer[model_type]
        yield f"model type `{model_type}`", f"{_code(trained)}, sharded by {_code(layer)}"
    parts = {
        "attention": family.attention,
        "mlp": family.mlp,
        "shared experts": family.shared_experts,
        "routed experts (fused tensors)": family.experts,
        "router": family.router,
        "other": family.other,
        "never adapted": family.bypassed,
    }
    yield from ((label, _code(*names)) for label, names in parts.items() if names)
    for meant, names in _by_meaning(family).items():
        yield f"{_code(*names)} means", _code(*meant)
    for wrapper in family.wrappers:
        inside = ", ".join(f"{_code(there)} is {_code(here)}" for there, here in wrapper.stored.items())
        yield f"wrapped by {_code(wrapper.class_name)}", f"model type {_code(wrapper.model_type)}; stored {inside}"
    yield "transformers", f"{family.min_transformers} or later"


def _by_meaning(family: Family) -> dict[tuple[str, ...], list[str]]:
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name, meant in family.aliases.items():
        grouped.setdefault(meant, []).append(name)
    return grouped


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(families_page(), end="")
