"""Rows decoded with their marks: nothing hidden, nothing that acts on a terminal, readable without colour."""

from __future__ import annotations

from typing import Any

import pytest
from fake_prepared import FakePrepared

from shardtune.data.show_rows import as_text, beginning, evenly_spaced, pieces, show_row, show_rows, visible

WORDS = {"<s>": 1, "</s>": 2, "w00": 5, "w01": 6, "w02": 7}


def shown(tokenizer: Any, ids: list[int], masked: int) -> str:
    return as_text(show_row(FakePrepared([(ids, masked)]), 0, tokenizer), colour=False).plain


def test_brackets_enclose_exactly_the_supervised_stretch(words: Any) -> None:
    assert shown(words, [5, 6, 7, 2], 2) == "w00 w01⟦ w02⟨</s>⟩⟧"


def test_the_first_token_is_never_marked_because_nothing_predicts_it(words: Any) -> None:
    row = show_row(FakePrepared([([5, 6, 2], 0)]), 0, words)
    assert [piece.supervised for piece in row.head] == [False, True, True]
    assert row.supervised == 2


def test_supervised_stretches_apart_from_each_other_get_brackets_each(words: Any) -> None:
    from rich.text import Text

    from shardtune.data.show_rows import ShownRow

    row = ShownRow(0, 5, 2, tuple(pieces([5, 6, 7, 5, 6], [False, True, False, True, False], words)))
    text = as_text(row, colour=False)
    assert isinstance(text, Text) and text.plain == "w00⟦ w01⟧ w02⟦ w00⟧ w01"


def test_special_tokens_are_shown_by_name_though_decode_would_hide_them(words: Any) -> None:
    assert words.decode([1, 5], skip_special_tokens=True) == "w00"
    assert shown(words, [1, 5, 2], 3) == "⟨<s>⟩ w00⟨</s>⟩"


def test_a_templates_own_special_token_is_special_too(bytes_bpe: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(bytes_bpe)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    ids = tokenizer("<|turn|>the")["input_ids"]
    assert shown(tokenizer, ids, len(ids)) == "⟨<|turn|>⟩the"


def test_a_literal_name_in_the_text_is_not_mistaken_for_the_special_token(bytes_bpe: Any) -> None:
    ids = bytes_bpe("a </")["input_ids"] + bytes_bpe("s>")["input_ids"]
    assert shown(bytes_bpe, ids, len(ids)) == "a </s>"


def test_a_row_that_ends_with_a_newline_shows_it_without_a_line_more(bytes_bpe: Any) -> None:
    ids = bytes_bpe("the\n")["input_ids"]
    assert shown(bytes_bpe, ids, len(ids)) == "the⏎"


def test_newlines_are_seen_and_break_the_line(bytes_bpe: Any) -> None:
    ids = bytes_bpe("the\n\nanswer")["input_ids"]
    assert shown(bytes_bpe, ids, len(ids)) == "the⏎\n⏎\nanswer"


@pytest.mark.parametrize("text", ["what is the answer 😀 ?", "早上好", "naïve — „ja“", "  two  spaces "])
def test_pieces_add_up_to_the_text(bytes_bpe: Any, text: str) -> None:
    ids = bytes_bpe(text)["input_ids"]
    found = list(pieces(ids, [False] * len(ids), bytes_bpe))
    assert "".join(piece.text for piece in found) == text
    assert [token for piece in found for token in piece.ids] == ids


def test_bytes_of_one_character_make_one_piece(bytes_bpe: Any) -> None:
    ids = bytes_bpe("a😀b")["input_ids"]
    assert len(ids) == 6  # four of them are the bytes of the emoji
    assert [piece.text for piece in pieces(ids, [False] * 6, bytes_bpe)] == ["a", "😀", "b"]


def test_a_mask_that_begins_inside_a_character_is_still_shown_at_its_token(bytes_bpe: Any) -> None:
    ids = bytes_bpe("a😀b")["input_ids"]
    found = list(pieces(ids, [False, False, False, True, True, True], bytes_bpe))
    assert [piece.supervised for piece in found for _ in piece.ids] == [False, False, False, True, True, True]
    assert [piece.text.strip("\ufffd") for piece in found] == ["a", "", "b"]


def test_bytes_that_are_no_text_do_not_swallow_what_follows(bytes_bpe: Any) -> None:
    broken = bytes_bpe("😀")["input_ids"][:1]
    ids = broken * 9 + bytes_bpe("the")["input_ids"]
    found = list(pieces(ids, [False] * len(ids), bytes_bpe))
    assert found[-1].text.endswith("the") and [token for piece in found for token in piece.ids] == ids


def test_a_token_unknown_to_the_tokenizer_is_shown_by_its_number(words: Any) -> None:
    assert shown(words, [5, 9999], 2) == "w00⟨id 9999⟩"


def test_a_sentencepiece_like_tokenizer_keeps_its_spaces() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "s": 2}))
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([1]) == "two"  # alone, the space is lost
    assert shown(tokenizer, [0, 1, 2], 1) == "one⟦ twos⟧"


def test_text_that_could_act_on_a_terminal_or_mislead_the_eye_is_written_out() -> None:
    assert visible("\x1b[2J\r\x9b") == "\\x1b[2J\\x0d\\x9b"
    assert visible("abc\u202edef\u200b\ud800") == "abc\\u202edef\\u200b\\ud800"
    assert visible("⟦no⟧") == "\\u27e6no\\u27e7"  # else the data could fake a mark
    assert visible("👩\u200d🔬\t") == "👩\u200d🔬⇥"


def test_of_a_long_row_the_middle_is_left_out_and_counted(words: Any) -> None:
    prepared = FakePrepared([([5] * 60 + [6] * 40, 50)])
    row = show_row(prepared, 0, words, limit=20)
    assert (len(row.head), len(row.tail), row.left_out, row.left_out_supervised) == (15, 5, 80, 45)
    text = as_text(row, colour=False).plain
    assert "… 80 tokens not shown, 45 of them supervised …" in text
    assert text.endswith("⟦w01 w01 w01 w01 w01⟧")


def test_colour_says_the_same_without_brackets(words: Any) -> None:
    text = as_text(show_row(FakePrepared([([5, 6, 7, 2], 2)]), 0, words), colour=True)
    assert text.plain == "w00 w01 w02</s>"
    underlined = [text.plain[s.start : s.end] for s in text.spans if "underline" in str(s.style)]
    assert underlined == [" w02", "</s>"]


def test_markup_in_a_row_stays_text(bytes_bpe: Any) -> None:
    ids = bytes_bpe("[bold red]x[/]")["input_ids"]
    assert shown(bytes_bpe, ids, len(ids)) == "[bold red]x[/]"


def test_rows_are_spread_over_the_set_and_always_the_same() -> None:
    assert evenly_spaced(100, 4) == [0, 25, 50, 75]
    assert evenly_spaced(3, 10) == [0, 1, 2]
    assert evenly_spaced(0, 5) == [] and evenly_spaced(5, 0) == []


def test_show_rows_keeps_the_numbers_of_the_rows(words: Any) -> None:
    prepared = FakePrepared([([5, 6], 0)] * 10)
    assert [row.number for row in show_rows(prepared, 2, words)] == [0, 5]
    assert show_rows(prepared, 1, words)[0].title == "row 0: 2 tokens, 1 supervised (50%)"


def test_the_beginning_is_one_line_of_bounded_length(bytes_bpe: Any) -> None:
    ids = [0, *bytes_bpe("one\ntwo " + "x" * 300)["input_ids"]]
    line = beginning(ids, bytes_bpe, 20)
    assert line.startswith("one⏎ two xxx") and len(line) == 20 and line.endswith("…")
