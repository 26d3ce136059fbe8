"""Which parts of the model train in full? Those that `lora.modules_to_save` names: embedding, head, norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtune.adapters.sites import matches
from shardtune.config.schema import LoraSection, entries_of
from shardtune.errors import UserInputError
from shardtune.model.quantized import Fp8Linear

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedModel


def saved_modules(model: PreTrainedModel, section: LoraSection, adapted: Collection[str]) -> list[str]:
    """Full names of the modules that train in full, in the model's order.

    Args:
        adapted: What gets an adapter.

    Raises:
        UserInputError: an entry names nothing, a part with parts of its own, what gets an adapter, or one side of a
            tied embedding.
    """
    leaves = {
        name: module
        for name, module in model.named_modules()
        if name and next(module.children(), None) is None and next(module.parameters(), None) is not None
    }
    found: list[str] = []
    for entry in entries_of(section.modules_to_save):
        named = [name for name in leaves if matches(entry, name)]
        if not named:
            last = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in leaves))
            raise _refusal(entry, "matches no layer of the model", f"Layers there are: {last}.")
        for name in named:
            if name in adapted:
                raise _refusal(name, "gets an adapter as well", "Take it out of lora.target_modules, or out of here.")
            if isinstance(leaves[name], Fp8Linear):
                raise _refusal(name, "is held in FP8, which does not train", "Set model.base_precision: bf16.")
            if name.rpartition(".")[2] in _tied(model):
                raise _refusal(
                    name,
                    "is one matrix with the other end of the model (tie_word_embeddings), and would be torn from it",
                    "Use model.new_tokens for tokens that the model shall learn.",
                )
        found += [name for name in named if name not in found]
    return found


def _tied(model: PreTrainedModel) -> set[str]:
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if not model.config.get_text_config().tie_word_embeddings:
        return set()
    return {name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in ends)}


def _refusal(name: str, what: str, fix: str) -> UserInputError:
    return UserInputError(f"lora.modules_to_save: '{name}' {what}.", fix=fix)
