"""Where does each token end, without asking for places? For byte-level BPE the token's own length tells.

Offsets cost a third of tokenising. A byte-level token stands for as many bytes as its name has characters, so the ends
are a running sum. Used only where a probe gives the same as the tokenizer's own offsets; and a row whose bytes do not
add up takes those.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = (
    "plain words, and more of them",
    "Größe 12.5 €\n\n\tline — naïve café",
    "emoji 👩‍👩‍👧 and 日本語 and \u00a0 spaces   ",
    'don\'t {"a": [1, 2]}  \n',
)


class ByteEnds:
    """Tokens of texts that hold their special tokens already, with the byte each token ends at."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, lengths: NDArray[np.int32]) -> None:
        self.tokenizer, self.lengths = tokenizer, lengths

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteEnds | None:
        """None where the tokenizer is of another kind, or the probe shows a difference."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if (
            backend is None
            or not hasattr(backend, "encode_batch_fast")
            or not _is_byte_level(json.loads(backend.to_str()))
        ):
            return None
        vocabulary = tokenizer.get_vocab()
        lengths = np.zeros(max(vocabulary.values()) + 1, np.int32)
        for token, number in vocabulary.items():
            lengths[number] = len(token)
        for number, added in tokenizer.added_tokens_decoder.items():
            lengths[number] = len(added.content.encode("utf-8"))
        made = cls(tokenizer, lengths)
        return made if made._agrees(_PROBES + tuple(tokenizer.all_special_tokens)) else None

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[int] | None]]:
        """(ids, byte ends) of each text; None for ends that do not add up to the text."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        rows: list[tuple[list[int], list[int] | None]] = []
        for text, encoding in zip(texts, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            ids = encoding.ids
            ends = np.cumsum(self.lengths[ids])
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
            rows.append((ids, ends.tolist() if ids and int(ends[-1]) == size else None))
        return rows

    def _agrees(self, probes: Sequence[str]) -> bool:
        slow = self.tokenizer(list(probes), add_special_tokens=False, return_offsets_mapping=True)
        for probe, (ids, ends), wanted, places in zip(
            probes, self.encode(probes), slow["input_ids"], slow["offset_mapping"], strict=True
        ):
            if ids != wanted or ends is None:
                return False
            # A token may end inside a character; a span never does, so only the ends on whole characters count.
            whole = set(byte_positions(probe, range(len(probe) + 1)))
            at = {end for end in ends if end in whole}
            if not at <= set(byte_positions(probe, [end for _, end in places])):
                return False
        return True


def byte_positions(text: str, positions: Sequence[int]) -> list[int]:
    """Characters' places in a text as places in its UTF-8."""
    if text.isascii():
        return list(positions)
    return [len(text[:position].encode("utf-8")) for position in positions]


def _is_byte_level(spec: dict[str, Any]) -> bool:
    pre = spec.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
    return (
        (spec.get("model") or {}).get("type") == "BPE"
        and spec.get("normalizer") is None
        and bool(byte_level)
        and not any(part.get("add_prefix_space") for part in byte_level)
    )
