"""What does a model answer? Greedy, to the end of its turn, several prompts at a time as if each were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Answer:
    """Token ids without the end token; `ended` is false where `max_new_tokens` cut it off."""

    ids: tuple[int, ...]
    ended: bool


def greedy_answers(
    model: PeftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    never: Sequence[int] = (),
    batch_size: int,
    done: Callable[[int], None] = lambda done: None,
    stopping: Callable[[int], StoppingCriteria] | None = None,
) -> list[Answer]:
    """The likeliest continuation of each prompt, token by token.

    Prompts are padded on the left and their positions counted without the padding, so an answer does not depend on
    the other prompts of its batch (except by rounding, where two tokens are equally likely).

    Args:
        model: In the state that is to answer.
        max_new_tokens: Longest answer, its end token included.
        ends: Tokens that end an answer; must not be empty.
        never: Tokens that are not answered (the base's, of those it has no weights for).
        done: Called with the number of prompts that are answered.
        stopping: Makes what else stops an answer, for the length that a batch's prompts are padded to.

    Raises:
        torch.cuda.OutOfMemoryError: one prompt alone does not fit.
    """
    found: dict[int, Answer] = {}
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    pending = [order[start : start + batch_size] for start in range(0, len(order), batch_size)][::-1]
    while pending:
        places = pending.pop()
        try:
            answers = _batch(model, [prompts[place] for place in places], max_new_tokens, ends, never, stopping)
        except torch.cuda.OutOfMemoryError:
            if len(places) == 1:
                raise
            torch.cuda.empty_cache()
            half = len(places) // 2
            pending += [places[half:], places[:half]]
            continue
        found.update(zip(places, answers, strict=True))
        done(len(found))
    return [found[place] for place in range(len(prompts))]


def _batch(
    model: PeftModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Sequence[int],
    never: Sequence[int],
    stopping: Callable[[int], StoppingCriteria] | None,
) -> list[Answer]:
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    pad = ends[0]  # only the mask tells padding
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    # All of it is said here: what a model's own generation config asks for (a temperature, a penalty) is not greedy.
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(ends),
        pad_token_id=pad,
        suppress_tokens=list(never) or None,
        use_cache=True,
    )
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([stopping(longest)] if stopping is not None else []),
        )
    return [_answer(row, ends) for row in output[:, longest:].tolist()]


def _answer(ids: Sequence[int], ends: Sequence[int]) -> Answer:
    """Up to the first end token; everything from there on is padding, whatever its id."""
    stop = next((place for place, token in enumerate(ids) if token in ends), None)
    return Answer(tuple(ids[:stop]), stop is not None)
