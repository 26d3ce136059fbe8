"""How do new tokens train? PEFT's rows for them (`trainable_token_indices`), without a copy of the whole vocabulary.

PEFT's own forward copies embedding and head in every pass to put the rows in, and takes a gradient of their full size.
Here its layers keep what they hold and what they save, and only their forward changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_ADAPTER = "default"


def token_indices(model: PreTrainedModel, ids: Sequence[int]) -> dict[str, list[int]]:
    """PEFT's `trainable_token_indices`: the rows of the embedding, and of the head where that is another matrix.

    A token that only the embedding knows can be read and never written: its row in the head would stay what it was.

    Raises:
        UserInputError: the head has a bias.
    """
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserInputError(
            f"model.new_tokens: {type(model).__name__} cannot learn new tokens.",
            why="Its output head has a bias, which PEFT ignores when rows of the head train.",
            fix="Use existing tokens of the tokenizer instead of new ones.",
        )
    names = {id(module): name for name, module in model.named_modules()}
    places = [names[id(model.get_input_embeddings())]]
    head = model.get_output_embeddings()
    if head is not None and not model.config.get_text_config().tie_word_embeddings:
        places.append(names[id(head)])
    return {place: list(ids) for place in places}


def use_token_rows(model: PeftModel) -> None:
    """Switch PEFT's layers of new tokens to compute with the new rows alone; call it before sharding."""
    for wrapper in model.modules():
        if not isinstance(wrapper, TrainableTokensWrapper):
            continue
        layer = wrapper.token_adapter
        layer.__class__ = TokenRows
        if layer.tied_adapter is None:
            delattr(layer.trainable_tokens_original, _ADAPTER)  # for taking back a merge: there is none here


class TokenRows(TrainableTokensLayer):
    """PEFT's layer of trainable rows; where its adapter is simply active, it touches those rows alone."""

    def forward_adapters(self, x: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any) -> Tensor:
        base = self.base_layer
        if self.disable_adapters or self.merged or active_adapters != [_ADAPTER]:
            result: Tensor = super().forward_adapters(x, active_adapters, *args, **kwargs)
            return result
        ids, rows = self.rows_on(x.device)
        if isinstance(base, nn.Linear):
            return base(x).index_copy_(-1, ids, F.linear(x, rows.to(x.dtype)))  # type: ignore[no-any-return]
        known: Tensor = base(x)
        place = torch.searchsorted(ids, x).clamp(max=len(ids) - 1)
        own = F.embedding(place, rows).to(known.dtype)
        scale = self._get_embed_scale()  # Gemma's embedding multiplies what it has looked up
        if scale is not None:
            own = own * scale.to(own.dtype)
        return torch.where((ids[place] == x).unsqueeze(-1), own, known)

    def rows_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The ids in rising order, and their rows."""
        ids: Tensor | None = self.__dict__.get("_ids")
        if ids is None or ids.device != device:  # made once: a copy from the host in every pass would wait for it
            ids = self.__dict__["_ids"] = torch.tensor(self.token_indices[_ADAPTER], device=device)
        return ids, self.trainable_tokens_delta[_ADAPTER]


# PEFT finds its layers by this name when it puts a second adapter on a model.
TokenRows.__name__ = TrainableTokensLayer.__name__


def head_and_rows(head: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The matrix of an output head, and the ids and rows that stand in for some of its own."""
    if not isinstance(head, TrainableTokensWrapper):
        return head.weight, None, None  # type: ignore[return-value]
    layer = head.token_adapter
    weight = layer.base_layer.weight
    if not isinstance(layer, TokenRows) or layer.disable_adapters:
        return weight, None, None
    return weight, *layer.rows_on(weight.device)
