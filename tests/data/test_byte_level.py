"""The fast way to a token's end gives the same tokens and labels as the tokenizer's own offsets."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardtune.config.schema import DataSection
from shardtune.data.byte_level import ByteEnds
from shardtune.data.formats import FormatChoice, Rendered
from shardtune.data.tokens import Encoder

PIECES = [
    "hello",
    "Größe",
    "👩‍👩‍👧",
    "日本語",
    "\n\n",
    " ",
    "don't",
    "<|im_end|>",
    "<|im_start|>",
    "12.5",
    "é",
    "\u00a0",
    "𝔘",
    "}",
]


def tokenizer(*, prefix_space: bool = False, lower: bool = False) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    if lower:
        made.normalizer = normalizers.Lowercase()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    made.train_from_iterator(["hello hello Größe hello日本語 don't"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", bos_token="<|im_start|>")


def rows(seed: int, count: int) -> list[Rendered]:
    """Random text with random spans that start and end on characters."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 30)))
        bounds = sorted(rng.sample(range(len(text) + 1), k=min(len(text) + 1, 4)))
        spans = tuple((a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=False) if a < b)
        made.append(Rendered(text, spans, special=True))
    return made


@pytest.mark.parametrize("seed", range(5))
def test_labels_are_those_of_the_offsets_for_any_text_and_spans(seed: int) -> None:
    encoder = Encoder(DataSection(dataset_name_or_path="d"), tokenizer(), FormatChoice("chat", "", ("messages",)))
    assert encoder.byte_ends is not None
    rendered = rows(seed, 200)
    fast = encoder.encode(rendered)
    encoder.byte_ends = None
    slow = encoder.encode(rendered)
    assert [(row.ids, row.labels) for row in fast] == [(row.ids, row.labels) for row in slow]
    assert any(label != -100 for row in fast for label in row.labels)


@pytest.mark.parametrize("kind", [{"prefix_space": True}, {"lower": True}])
def test_tokenizers_that_change_the_text_are_left_to_their_offsets(kind: dict[str, bool]) -> None:
    assert ByteEnds.of(tokenizer(**kind)) is None


def test_a_word_level_tokenizer_is_left_to_its_offsets() -> None:
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    assert ByteEnds.of(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")) is None


def test_a_text_whose_bytes_do_not_add_up_is_told_apart() -> None:
    made = ByteEnds.of(tokenizer())
    assert made is not None
    made.lengths = made.lengths + 1
    assert [ends for _, ends in made.encode(["hello"])] == [None]
