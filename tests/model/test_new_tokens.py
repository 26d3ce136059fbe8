"""Tokens of `model.new_tokens`: in the tokenizer, in the data's fingerprint, and with room in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import toy_text_config
from transformers import AutoModelForCausalLM

from shardtune.config.schema import ModelSection
from shardtune.data.cache import tokenizer_identity
from shardtune.model.load import load_tokenizer, tokenizer_and_new_tokens
from shardtune.model.new_tokens import resize_embeddings


def section(folder: Path, *tokens: str) -> ModelSection:
    return ModelSection(model_name_or_path=str(folder), new_tokens=list(tokens))


def on_meta(**changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(toy_text_config("llama", **changes))


def test_new_tokens_are_single_tokens_wherever_they_stand_and_survive_decoding(toy_model: Path) -> None:
    tokenizer, new = tokenizer_and_new_tokens(section(toy_model, "<|tool|>", "<|/tool|>"))
    assert dict(new.numbers) == {"<|tool|>": 65, "<|/tool|>": 66} and not new.existing
    ids = tokenizer("w01<|tool|>w02<|/tool|>")["input_ids"]
    assert [number for number in ids if number > 64] == [65, 66]
    assert "<|tool|>" in tokenizer.decode(ids, skip_special_tokens=True)


def test_prepared_data_is_another_with_new_tokens(toy_model: Path) -> None:
    without, one, other = (tokenizer_identity(load_tokenizer(section(toy_model, *t))) for t in ([], ["<a>"], ["<b>"]))
    assert len({without, one, other}) == 3


def test_a_token_that_the_model_has_already_is_told_and_keeps_its_row(toy_model: Path) -> None:
    _, named = tokenizer_and_new_tokens(section(toy_model, "w05", "<new>"))
    new = resize_embeddings(on_meta(), named)
    assert new.existing == ("w05",) and not new.is_unknown("w05") and new.is_unknown("<new>")
    assert "the model has w05 already" in new.notices()[1]


def test_a_token_that_only_the_tokenizer_has_is_new_to_the_model(toy_model: Path, tmp_path: Path) -> None:
    load_tokenizer(section(toy_model, "<a>")).save_pretrained(tmp_path)
    own = ModelSection(
        model_name_or_path=str(toy_model), tokenizer_name_or_path=str(tmp_path), new_tokens=["<a>", "<b>"]
    )
    new = resize_embeddings(on_meta(vocab_size=65), tokenizer_and_new_tokens(own)[1])
    assert new.existing == ("<a>",) and new.is_unknown("<a>") and new.stored == 65
    assert len(new.notices()) == 1


def test_spare_rows_are_taken_first_and_the_embedding_grows_only_as_far_as_it_must(toy_model: Path) -> None:
    _, named = tokenizer_and_new_tokens(section(toy_model, "<a>", "<b>"))
    for before, after in ((72, 72), (66, 67), (65, 67)):
        model = on_meta(vocab_size=before, tie_word_embeddings=False)
        new = resize_embeddings(model, named)
        assert model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == after
        assert new.stored == before
        assert ("grows" in new.notices()[0]) is (after > before)
