"""Tokenizers of three kinds, a place for `datasets` to cache, and short ways to write data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from toys import toy_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardtune.config.schema import DataSection

Write = Callable[..., DataSection]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets-cache")
    datasets.disable_progress_bars()
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows as a .jsonl and get the section that reads them."""

    def write(rows: list[dict[str, Any]], **settings: Any) -> DataSection:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return DataSection(dataset_name_or_path=str(path), **settings)

    return write


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per word; adds neither begin nor end."""
    folder = tmp_path_factory.mktemp("words")
    toy_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def byte_level(post_processor: Any = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's, trained on a few lines: `<s>` is 0 and `</s>` 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["the answer is forty two", "what is the answer", "the the answer answer"] * 5, trainer
    )
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="session")
def bytes_bpe() -> PreTrainedTokenizerFast:
    return byte_level(processors.ByteLevel(trim_offsets=True))


@pytest.fixture(scope="session")
def begins() -> PreTrainedTokenizerFast:
    """Puts `<s>` before every text, as Llama's does."""
    return byte_level(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))


@pytest.fixture(scope="session")
def begins_and_ends() -> PreTrainedTokenizerFast:
    """Puts `<s>` before and `</s>` behind every text."""
    return byte_level(processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]))
