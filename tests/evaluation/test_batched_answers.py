"""Answers given together are those given alone, and those of a plain loop without a cache, in every kind of model."""

from __future__ import annotations

import random

import pytest
import torch
from toys import toy_text_config

from shardtune.evaluation.answers import Answer, greedy_answers

ENDS = [2, 5, 6, 7, 8, 9, 10, 11]  # many, so that some answers end early and others do not
CLASSES = {"mistral4": "Mistral4ForCausalLM"}


def plain(model: torch.nn.Module, prompt: list[int], tokens: int) -> Answer:
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token in ENDS:
            return Answer(tuple(ids[len(prompt) :]), True)
        ids.append(token)
    return Answer(tuple(ids[len(prompt) :]), False)


# Attention; MLA and experts; linear attention; Mamba; convolutions; sliding windows; attention sinks.
@pytest.mark.parametrize("kind", ["llama", "mistral4", "qwen3_next", "falcon_h1", "lfm2", "gemma3_text", "gpt_oss"])
def test_batches_do_not_change_answers(kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = toy_text_config(kind)
    made = getattr(transformers, CLASSES[kind]) if kind in CLASSES else None
    model = (made(config) if made else transformers.AutoModelForCausalLM.from_config(config)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # else a random model repeats one token
    rng = random.Random(1)
    prompts = [[rng.randrange(12, 72) for _ in range(length)] for length in (3, 17, 9, 1, 12)]
    wanted = [plain(model, prompt, 8) for prompt in prompts]
    assert len({answer.ids for answer in wanted}) > 3
    seen: list[int] = []
    for size in (1, 2, 5):
        found = greedy_answers(model, prompts, max_new_tokens=8, ends=ENDS, batch_size=size, done=seen.append)
        assert found == wanted
    assert seen[-1] == len(prompts)


def test_a_token_that_a_side_does_not_have_is_never_its_answer() -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toy_text_config("llama")).eval()
    free = greedy_answers(model, [[20, 30]], max_new_tokens=1, ends=[2], batch_size=1, done=lambda done: None)
    token = free[0].ids[0]
    other = greedy_answers(
        model, [[20, 30]], max_new_tokens=1, ends=[2], never=[token], batch_size=1, done=lambda done: None
    )
    assert other[0].ids and other[0].ids[0] != token
