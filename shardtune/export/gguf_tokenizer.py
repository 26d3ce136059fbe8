"""Which tokenizer does a GGUF file state? Tokens, merges and ids; and how llama.cpp splits text, by a name it knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's src/llama-vocab.cpp: for each name the expression it splits by, whether digits are split off first, and
# whether a word that is a token as it stands is not merged.
_KNOWN: dict[tuple[str | None, bool, bool], str] = {
    (_LLAMA3, False, True): "llama-bpe",
    (_QWEN2, False, False): "qwen2",
    (_TEKKEN, False, True): "tekken",
    (None, True, False): "smollm",
    (None, False, False): "gpt-2",
}


@dataclass(frozen=True)
class GgufTokenizer:
    """Attributes:
    pre: How text is split, by llama.cpp's name.
    ids: `bos`, `eos`, `unknown`, `padding`, `turn` (the end of an answer) → id, of those there are.
    add: `bos` and `eos` → are they put around a text?
    """

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: Mapping[str, int]
    add: Mapping[str, bool]
    chat_template: str | None


def gguf_tokenizer(tokenizer: PreTrainedTokenizerBase, rows: int) -> GgufTokenizer:
    """Args:
        rows: Of the embedding; ids that no token has are filled up.

    Raises:
        UserInputError: llama.cpp would split text in another way, or is not known to split it so.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unknown("it is not one of the package tokenizers")
    stated: dict[str, Any] = json.loads(backend.to_str())
    model = stated["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or not _ends_in_bytes(stated["pre_tokenizer"]):
        raise _unknown("it is not byte-level BPE (SentencePiece's scores are not in tokenizer.json)")
    pre = _pre(stated["pre_tokenizer"], bool(model.get("ignore_merges")))
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(by_id) >= rows:
        raise UserInputError(
            f"--to gguf: the tokenizer has ids up to {max(by_id)}, and the model {rows} rows.",
            fix="Use the tokenizer that belongs to the model.",
        )
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for index in range(rows):
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        special = added[index].special if index in added else None
        types.append(
            UNUSED if index not in by_id else NORMAL if special is None else CONTROL if special else USER_DEFINED
        )
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    around = tokenizer("a")["input_ids"]
    given = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    ids = {name: index for name, index in given.items() if index is not None}
    template = tokenizer.chat_template
    return GgufTokenizer(
        pre,
        tokens,
        types,
        merges,
        ids,
        {"bos": around[:1] == [ids.get("bos")], "eos": len(around) > 1 and around[-1:] == [ids.get("eos")]},
        template if isinstance(template, str) else None,
    )


def _pre(pre_tokenizer: dict[str, Any], ignores_merges: bool) -> str:
    split, digits = None, False
    own = False  # ByteLevel's own expression, GPT-2's
    for part in _parts(pre_tokenizer):
        kind = part["type"]
        if kind == "Split" and split is None and part["behavior"] == "Isolated" and not part["invert"]:
            split = part["pattern"].get("Regex")
        elif kind == "Digits" and part["individual_digits"]:
            digits = True
        elif kind == "ByteLevel" and not part["add_prefix_space"]:
            own = part["use_regex"]
        else:
            raise _unknown(f"its pre-tokenizer has a step that llama.cpp's do not have ({kind})")
    name = _KNOWN.get((split, digits, ignores_merges)) if own != (split is not None) else None
    if name is None:
        raise _unknown("its pre-tokenizer is none of " + ", ".join(_KNOWN.values()))
    return name


def _parts(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return list(pre_tokenizer["pretokenizers"])
    return [pre_tokenizer]


def _ends_in_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    parts = _parts(pre_tokenizer)
    return bool(parts) and parts[-1]["type"] == "ByteLevel"


def _unknown(why: str) -> UserInputError:
    return UserInputError(
        "--to gguf: llama.cpp is not known to split text as this tokenizer does.",
        why=f"{why[0].upper()}{why[1:]}.",
        fix="Export merged weights (--to merged) and convert them with llama.cpp's convert_hf_to_gguf.py.",
    )
