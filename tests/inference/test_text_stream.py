"""Text appears as it is generated: never half a character, never a blank or a template's end too many."""

from __future__ import annotations

import pytest
from chat_tokenizers import chat_tokenizer

from shardtune.inference.text_stream import AnswerText, TokenText

TEXTS = ("plain words", "Größe — 12 €", "日本語の文", "👩‍👩‍👧 family, 🇩🇪!", "  indented\n\n\tcode  ", "naïve café\n")


@pytest.mark.parametrize("text", TEXTS)
def test_every_piece_is_whole_and_together_they_are_the_text(text: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    ids = tokenizer(text)["input_ids"]
    stream = TokenText(tokenizer, tokenizer("a prompt: ")["input_ids"])
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert text.isascii() or "" in pieces, "else no character was of several tokens"


def test_an_answer_that_is_cut_within_a_character_ends_before_it() -> None:
    tokenizer = chat_tokenizer("chatml")
    ids = tokenizer("ok 👩")["input_ids"]
    stream = TokenText(tokenizer)
    assert "".join(stream.add(token) for token in ids[:-1]) + stream.finish(is_cut=True) == "ok "
    assert stream.finish(is_cut=False) == "\ufffd"  # the model itself ended there


def test_whole_characters_between_broken_ones_are_not_lost() -> None:
    class Bytes:
        """Tokens that end within a character, as merges of bytes do."""

        pieces = (b"ff", b"\xf0\x9f", "к".encode() + b"\xf0")

        def decode(self, ids: list[int], **_: object) -> str:
            return b"".join(self.pieces[token] for token in ids).decode("utf-8", "replace")

    stream = TokenText(Bytes())  # type: ignore[arg-type]
    assert [stream.add(token) for token in (0, 1, 2)] == ["ff", "", ""]
    assert stream.finish(is_cut=True) == "\ufffdк"


def test_bytes_that_are_no_character_do_not_hold_back_what_follows() -> None:
    tokenizer = chat_tokenizer("chatml")
    broken = [*tokenizer("👩")["input_ids"][:2], *tokenizer("then words")["input_ids"]]
    stream = TokenText(tokenizer)
    assert "".join(stream.add(token) for token in broken).endswith("then words")


def test_special_tokens_are_not_shown() -> None:
    tokenizer = chat_tokenizer("chatml")
    stream = TokenText(tokenizer)
    ids = tokenizer("a<|im_start|><|endoftext|>b")["input_ids"]
    assert "".join(stream.add(token) for token in ids) == "ab"
    stream = TokenText(tokenizer, special=True)
    assert "".join(stream.add(token) for token in ids) == "a<|im_start|><|endoftext|>b"


def test_a_sentencepiece_word_keeps_its_space_after_the_prompt() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"▁once": 0, "▁upon": 1, "▁a": 2, "?": 3}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?")
    stream = TokenText(tokenizer, [0])
    assert [stream.add(1), stream.add(2)] == [" upon", " a"]
    assert TokenText(tokenizer).add(1) == "upon"


def shown(answer: AnswerText, *pieces: str) -> list[str]:
    given = [answer.add(piece) for piece in pieces]
    return [*given, answer.finish()]


def test_blanks_around_an_answer_are_left_out_and_those_in_it_are_not() -> None:
    assert shown(AnswerText(stripped=True), " ", "\n", " a", " ", " b\n", "\n") == ["", "", "a", "", "  b", "", ""]
    assert "".join(shown(AnswerText(stripped=False), " a ", "\n")) == " a \n"


def test_what_the_template_has_behind_an_answer_is_taken_away() -> None:
    given = shown(AnswerText(stripped=True, tail="\n###"), "a\n", "##", " b\n#", "##")
    assert given == ["a", "", "\n## b", "", ""]


def test_a_tail_ends_the_answer_where_training_had_no_end_token() -> None:
    answer = AnswerText(stripped=True, tail="###", tail_ends=True)
    assert answer.add("yes#") == "yes" and not answer.ended
    assert answer.add("## and more") == "" and answer.ended
    assert answer.finish() == "" and answer.text == "yes"
