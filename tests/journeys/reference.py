"""What does an adapter score, by plain transformers and PEFT? Imports nothing of ours, on purpose.

Rows become token ids and labels here a second time, one row at a time, in the most obvious way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One row: its tokens, and which of them are supervised (the others are IGNORED)."""

    ids: list[int]
    labels: list[int]

    def cut(self, length: int) -> Example:
        return Example(self.ids[:length], self.labels[:length])


@dataclass(frozen=True)
class Score:
    loss: float
    supervised: int
    tokens: int


def text_example(tokenizer: Any, text: str) -> Example:
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return Example(ids, list(ids))


def pair_example(tokenizer: Any, prompt: str, answer: str) -> Example:
    """Loss on the answer and the end of the row. The two are tokenised as one text, as they will be read."""
    whole = tokenizer(prompt + answer, return_offsets_mapping=True)
    labels = [
        token if end > len(prompt) else IGNORED
        for token, (_, end) in zip(whole["input_ids"], whole["offset_mapping"], strict=True)
    ]
    eos = tokenizer.eos_token_id
    return Example([*whole["input_ids"], eos], [*labels, eos])


def chat_example(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> Example:
    """Loss on what each assistant turn adds to the prompt before it, up to its end-of-turn token: generation stops
    there, so the line break that ChatML writes behind it is not the assistant's."""
    ids = _templated(tokenizer, messages)
    labels = [IGNORED] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_templated(tokenizer, messages[:index], add_generation_prompt=True))
            end = len(_templated(tokenizer, messages[: index + 1]))
            end = max((n + 1 for n in range(start, end) if ids[n] == tokenizer.eos_token_id), default=end)
            labels[start:end] = ids[start:end]
    return Example(ids, labels)


def _templated(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def load(model: Path, adapter: Path | None = None, dtype: str = "float32", **options: Any) -> Any:
    """The base model, with an adapter on it if one is given, ready for evaluation."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **options)
    return (base if adapter is None else PeftModel.from_pretrained(base, adapter)).eval()


def score(model: Any, examples: Iterable[Example]) -> Score:
    """Mean cross-entropy of all supervised tokens, every row on its own."""
    import torch

    total, supervised, tokens = 0.0, 0, 0
    with torch.no_grad():
        for example in examples:
            logits = model(input_ids=torch.tensor([example.ids])).logits[0, :-1].double()
            labels = torch.tensor(example.labels[1:])
            total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
            supervised += int((labels != IGNORED).sum())
            tokens += len(example.ids)
    return Score(total / supervised, supervised, tokens)
