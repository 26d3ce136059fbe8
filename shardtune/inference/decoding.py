"""Which token comes next? One forward pass each, with the keys and values of the tokens before it kept.

Not `generate` of transformers: base and tuned model take turns here, token by token, and an answer can be stopped at
each of them. The processors that temperature and top-p stand for are transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from shardtune.errors import MachineError, UserInputError
from shardtune.inference.load import LoadedModel
from shardtune.inference.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor


class Decoder:
    """Continues a prompt with the model or its base, token by token.

    Args:
        ids: The prompt.
        tuned: With the adapter, or the base alone.
    """

    def __init__(self, loaded: LoadedModel, ids: Sequence[int], sampling: Sampling, *, tuned: bool) -> None:
        self.loaded, self.tuned = loaded, tuned
        # Rows that the base has no weights for are zero there, and so would be their logits.
        self._rows = None if tuned else loaded.stored_rows
        self._ids = list(ids)
        self._read = 0  # so many of them are in the cache
        self._cache: Any = None
        self._draw: torch.Generator | None = None
        self._processors = LogitsProcessorList()
        if sampling.temperature:
            seeded = sampling.seeded()
            assert seeded.seed is not None
            # On the CPU, so that a seed means the same on every device.
            self._draw = torch.Generator().manual_seed(seeded.seed)
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
        forward = inspect.signature(loaded.model.get_base_model().forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}

    def next(self) -> int:
        """The next token's id, which the one after it will follow.

        Raises:
            MachineError: the model computes NaN.
            UserInputError: the conversation does not fit into the GPU's memory.
        """
        with torch.inference_mode():
            try:
                logits = self._logits()
            except torch.OutOfMemoryError as error:
                raise UserInputError(
                    f"{len(self._ids):,} tokens do not fit into the GPU's memory beside the model.",
                    why=str(error).partition("\n")[0],
                    fix="Ask something shorter or start a new conversation; --device cpu uses the host's memory.",
                ) from error
            if torch.isnan(logits).any():
                raise MachineError(
                    f"The {'tuned model' if self.tuned else 'base model'} computes NaN.",
                    why=f"After {len(self._ids):,} tokens its output is not a number, so there is no next token.",
                    fix="Try another checkpoint (--checkpoint), or model.torch_dtype: float32 if its values overflow.",
                )
            token = self._chosen(logits)
        self._ids.append(token)
        return token

    def _logits(self) -> Tensor:
        """Of the next token, in float32 on the CPU: (1, vocabulary)."""
        unread = torch.tensor([self._ids[self._read :]], device=self.loaded.device)
        with self.loaded.side(tuned=self.tuned) as model:
            output = model(input_ids=unread, past_key_values=self._cache, use_cache=True, **self._last_only)
        self._cache = output.get("past_key_values")
        if self._cache is not None:  # a model without one reads everything again
            self._read = len(self._ids)
        logits: Tensor = output.logits[:, -1].float().cpu()
        return logits if self._rows is None else logits[:, : self._rows]

    def _chosen(self, logits: Tensor) -> int:
        if self._draw is None:
            return int(logits.argmax(-1))
        scores = self._processors(torch.tensor([self._ids]), logits)  # type: ignore[arg-type]
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._draw))
