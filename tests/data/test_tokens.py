from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import pre_tokenizers

from shardtune.config.schema import DataSection
from shardtune.data.tokens import IGNORED, TokenCounts, tokenise_split
from shardtune.errors import UserInputError

TEMPLATE = "{q} => {a}"


def tokenise(section: DataSection, tokenizer: Any) -> tuple[list[dict], TokenCounts]:
    rows, counts = tokenise_split(section, "train", "data.train_split", tokenizer)
    assert rows.column_names == ["input_ids", "labels"]
    return list(rows), counts


def refusal(section: DataSection, tokenizer: Any, split: str = "train") -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        tokenise_split(section, split, "data.val_split", tokenizer)
    return caught.value


def learnt(row: dict, tokenizer: Any) -> str:
    """The text of the tokens that carry loss."""
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def hidden(row: dict, tokenizer: Any) -> str:
    return tokenizer.decode([t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label == IGNORED])


def test_only_the_answer_and_the_end_carry_loss(write: Any, words: Any) -> None:
    [row], counts = tokenise(write([{"q": "w01 w02", "a": "w03 w04"}], prompt_template=TEMPLATE), words)
    ids = words.convert_tokens_to_ids(["w01", "w02", "=>", "w03", "w04", "</s>"])
    assert row == {"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:]}
    assert replace(counts, largest_id=0) == TokenCounts(
        rows=1, tokens=6, supervised=3, cut=0, dropped_short=0, dropped_unsupervised=0, largest_id=0
    )


def test_all_tokens_carry_loss_when_asked_or_without_a_template(write: Any, words: Any) -> None:
    rows = [{"q": "w01 w02", "a": "w03", "text": "w01 w02 => w03"}]
    [asked], counts = tokenise(write(rows, prompt_template=TEMPLATE, train_on="all"), words)
    [plain], _ = tokenise(write(rows), words)
    assert asked == plain
    assert plain["labels"] == plain["input_ids"]
    assert counts.tokens == 5
    assert counts.supervised == 4  # the first token is never predicted


def test_what_follows_the_last_column_belongs_to_the_answer(write: Any, words: Any) -> None:
    [row], _ = tokenise(write([{"q": "w01", "a": "w02"}], prompt_template="{q} => {a} w59"), words)
    assert learnt(row, words) == "w02 w59 </s>"


def test_no_end_is_appended_when_not_asked(write: Any, words: Any) -> None:
    [row], _ = tokenise(write([{"q": "w01", "a": "w02"}], prompt_template=TEMPLATE, append_eos=False), words)
    assert learnt(row, words) == "w02"


def test_an_end_that_stands_in_the_data_is_not_doubled(write: Any, words: Any) -> None:
    [row], _ = tokenise(write([{"q": "w01", "a": "w02 </s>"}], prompt_template=TEMPLATE), words)
    assert learnt(row, words) == "w02 </s>"


@pytest.mark.parametrize("kind", ["words", "bytes_bpe", "begins", "begins_and_ends"])
@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_the_end_is_there_once_and_learnt_whether_or_not_the_tokenizer_adds_it(
    write: Any, request: pytest.FixtureRequest, kind: str, train_on: Any
) -> None:
    tokenizer = request.getfixturevalue(kind)
    section = write([{"q": "w01", "a": "w02"}], prompt_template=TEMPLATE, train_on=train_on)
    [row], _ = tokenise(section, tokenizer)
    assert row["input_ids"].count(tokenizer.eos_token_id) == 1
    assert row["labels"][-1] == row["input_ids"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["begins", "begins_and_ends"])
@pytest.mark.parametrize("template", ["{q} => {a}", "<s>{q} => {a}", "{a}"])
def test_the_begin_is_there_once_and_not_learnt(
    write: Any, request: pytest.FixtureRequest, kind: str, template: str
) -> None:
    tokenizer = request.getfixturevalue(kind)
    [row], _ = tokenise(write([{"q": "the", "a": "answer"}], prompt_template=template), tokenizer)
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1
    assert (row["input_ids"][0], row["labels"][0]) == (tokenizer.bos_token_id, IGNORED)
    assert learnt(row, tokenizer).lstrip() == "answer</s>"


def test_a_begin_written_in_plain_text_is_not_doubled(write: Any, begins: Any) -> None:
    [row], _ = tokenise(write([{"text": "<s>the answer"}]), begins)
    assert row["input_ids"].count(begins.bos_token_id) == 1
    assert begins.decode(row["input_ids"]) == "<s>the answer</s>"


def test_a_token_that_straddles_the_seam_is_learnt(write: Any, bytes_bpe: Any) -> None:
    [row], _ = tokenise(write([{"q": "what is", "a": "answer"}], prompt_template="{q} the {a}"), bytes_bpe)
    tokens = bytes_bpe.convert_ids_to_tokens(row["input_ids"])
    assert tokens[-2] == "Ġanswer"  # the space is the prompt's, the word the answer's
    assert hidden(row, bytes_bpe) == "what is the"
    assert learnt(row, bytes_bpe) == " answer</s>"


@pytest.mark.parametrize("kind", ["bytes_bpe", "begins", "begins_and_ends"])
def test_any_text_is_masked_up_to_the_byte_where_the_answer_starts(
    write: Any, request: pytest.FixtureRequest, kind: str
) -> None:
    """Against counting bytes, which needs no offsets."""
    tokenizer = request.getfixturevalue(kind)
    rng = random.Random(3)
    pieces = [
        "the",
        " answer",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "é",
        "日本",
        "👍🏽",
        "́",
        "x",
        "=>",
        "is",
        " ",
        "{",
        "\\n",
    ]

    def text(least: int) -> str:
        return "".join(rng.choices(pieces, k=rng.randint(least, 8)))

    data = [{"q": text(0), "a": text(1) + "."} for _ in range(150)]
    template = "{q}:{a}"
    rows, counts = tokenise(write(data, prompt_template=template), tokenizer)
    assert len(rows) == len(data)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for row, source in zip(rows, data, strict=True):
        prompt = f"{source['q']}:".encode()
        pairs = list(zip(row["input_ids"], row["labels"], strict=True))
        assert pairs.pop() == (tokenizer.eos_token_id, tokenizer.eos_token_id)
        if kind != "bytes_bpe":
            assert pairs.pop(0) == (tokenizer.bos_token_id, IGNORED)
        end = 0
        for token, label in pairs:
            piece = tokenizer.convert_ids_to_tokens(token)
            assert set(piece) <= set(alphabet)
            end += len(piece)  # one character of the alphabet per byte
            assert label == (token if end > len(prompt) else IGNORED), (source, piece)
        assert end == len((prompt.decode() + source["a"]).encode())
    assert counts.supervised == sum(label != IGNORED for row in rows for label in row["labels"][1:])
    assert counts.tokens == sum(len(row["input_ids"]) for row in rows)


def test_long_rows_are_cut_and_counted(write: Any, words: Any) -> None:
    data = [{"text": "w01 w02 w03"}, {"text": "w01 w02 w03 w04"}, {"text": " ".join(["w01"] * 5000)}]
    rows, counts = tokenise(write(data, max_length=4), words)
    assert [len(row["input_ids"]) for row in rows] == [4, 4, 4]
    assert rows[0]["labels"][-1] == words.eos_token_id
    assert words.eos_token_id not in rows[1]["labels"]  # a cut text does not end
    assert replace(counts, largest_id=0) == TokenCounts(
        rows=3, tokens=12, supervised=9, cut=2, dropped_short=0, dropped_unsupervised=0, largest_id=0
    )


def test_a_prompt_longer_than_max_length_leaves_nothing_to_learn_and_is_dropped(write: Any, words: Any) -> None:
    data = [{"q": "w01 w02 w03 w04", "a": "w05"}, {"q": "w01", "a": "w02 w03 w04"}, {"q": "w01", "a": "w02"}]
    rows, counts = tokenise(write(data, prompt_template=TEMPLATE, max_length=4), words)
    assert [learnt(row, words) for row in rows] == ["w02 w03", "w02 </s>"]
    assert replace(counts, largest_id=0) == TokenCounts(
        rows=2, tokens=8, supervised=4, cut=1, dropped_short=0, dropped_unsupervised=1, largest_id=0
    )


def test_empty_null_and_blank_rows_are_dropped_and_counted(write: Any, words: Any) -> None:
    data: list[dict] = [{"text": text} for text in ("", None, "  \n ", "w01 w02", "w03")]
    rows, counts = tokenise(write(data), words)
    assert [words.decode(row["input_ids"]) for row in rows] == ["w01 w02 </s>", "w03 </s>"]
    assert counts.dropped_short == 3
    assert (counts.rows, counts.tokens, counts.supervised) == (2, 5, 3)


@pytest.mark.parametrize("kind", ["bytes_bpe", "begins_and_ends"])
def test_blank_rows_are_dropped_however_many_tokens_a_blank_has(
    write: Any, request: pytest.FixtureRequest, kind: str
) -> None:
    rows, counts = tokenise(
        write([{"text": " \n\t  "}, {"text": ""}, {"text": "the answer"}]), request.getfixturevalue(kind)
    )
    assert len(rows) == 1
    assert counts.dropped_short == 2


def test_a_row_of_one_token_is_dropped(write: Any, words: Any) -> None:
    rows, counts = tokenise(write([{"text": "w01"}, {"text": "w01 w02"}], append_eos=False), words)
    assert len(rows) == 1
    assert counts.dropped_short == 1


@pytest.mark.parametrize("empty", ["q", "a"])
def test_a_row_with_a_null_cell_is_dropped_not_trained_on_as_the_word_none(write: Any, words: Any, empty: str) -> None:
    data = [{"q": "w01", "a": "w02"}, {"q": "w01", "a": "w02", empty: None}]
    rows, counts = tokenise(write(data, prompt_template=TEMPLATE), words)
    assert len(rows) == 1
    assert counts.dropped_short == 1


def test_an_answer_of_one_token_that_stands_first_has_nothing_before_it_to_predict_it_from(
    write: Any, words: Any
) -> None:
    section = write([{"a": "w01"}, {"a": "w01 w02"}], prompt_template="{a}", append_eos=False)
    rows, counts = tokenise(section, words)
    assert len(rows) == 1
    assert (counts.supervised, counts.dropped_short) == (1, 1)


def test_numbers_become_their_text(write: Any, words: Any, bytes_bpe: Any) -> None:
    [row], _ = tokenise(write([{"q": 12, "a": 2.5}], prompt_template="{q}={a}"), bytes_bpe)
    assert bytes_bpe.decode(row["input_ids"]) == "12=2.5</s>"


def test_order_is_kept_over_more_rows_than_one_batch_of_the_reader(write: Any, words: Any) -> None:
    data = [{"text": f"w{n % 60:02d} w{n // 60 % 60:02d}"} for n in range(2500)]
    rows, counts = tokenise(write(data), words)
    assert [words.decode(row["input_ids"][:2]) for row in rows] == [row["text"] for row in data]
    assert counts.rows == 2500


def test_a_dataset_saved_with_a_tensor_format_is_read_as_text(tmp_path: Path, words: Any) -> None:
    rows = datasets.Dataset.from_dict({"text": ["w01 w02"], "n": [3]})
    rows.with_format("torch").save_to_disk(tmp_path / "saved")
    section = DataSection(dataset_name_or_path=str(tmp_path / "saved"), prompt_template="{n} {text}")
    [row], _ = tokenise(section, words)
    assert learnt(row, words) == "w01 w02 </s>"


def test_a_missing_text_field_is_told(write: Any, words: Any) -> None:
    problem = refusal(write([{"txt": "a"}]), words)
    assert "no column 'text', which data.text_field names" in problem.what
    assert "txt" in problem.why


def test_a_missing_column_of_the_template_is_told(write: Any, words: Any) -> None:
    problem = refusal(write([{"q": "a"}], prompt_template=TEMPLATE), words)
    assert "no column 'a', which data.prompt_template names" in problem.what


def test_no_row_left_says_how_many_were_read_and_why_they_went(write: Any, words: Any) -> None:
    data: list[dict] = [{"q": "w01 w02 w03", "a": "w04"}, {"q": None, "a": "w01"}]
    problem = refusal(write(data, prompt_template=TEMPLATE, max_length=3), words)
    assert "No row of the split 'train' is left" in problem.what
    assert "2 were read" in problem.what
    assert "1 were empty" in problem.why
    assert "1 had no token that carries loss" in problem.why
    assert "data.max_length" in problem.fix


def test_an_empty_split_is_told(tmp_path: Path, words: Any) -> None:
    datasets.Dataset.from_dict({"text": ["w01"]}).save_to_disk(tmp_path / "saved")
    problem = refusal(DataSection(dataset_name_or_path=str(tmp_path / "saved")), words, "train[90%:]")
    assert "no rows" in problem.what
    assert "data.val_split" in problem.fix


def test_a_list_of_messages_is_not_trained_on_as_python_prints_it(write: Any, words: Any) -> None:
    problem = refusal(write([{"text": [{"role": "user", "content": "w01"}]}]), words)
    assert "column 'text' holds values of the type list, not text" in problem.what
    assert "role" in problem.why
    assert "column of strings" in problem.fix


def test_dates_are_refused_because_their_text_was_lost(write: Any, words: Any) -> None:
    problem = refusal(
        write([{"q": "w01", "a": "2020-01-01"}, {"q": "w02", "a": "2021-05-06"}], prompt_template=TEMPLATE), words
    )
    assert "column 'a'" in problem.what
    assert "read as dates" in problem.why


def test_a_file_in_another_encoding_is_told(tmp_path: Path, words: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "w01 é w02"}\n'.encode("latin1"))
    problem = refusal(DataSection(dataset_name_or_path=str(tmp_path / "a.jsonl")), words)
    assert "UTF-8" in problem.what
    assert "a.jsonl" in problem.what
    assert "iconv" in problem.fix


def test_a_tokenizer_without_offsets_is_refused_for_masking_and_accepted_for_all(
    write: Any, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(words), "is_fast", False)
    rows = [{"q": "w01", "a": "w02"}]
    problem = refusal(write(rows, prompt_template=TEMPLATE), words)
    assert "which tokens belong to the answer" in problem.what
    assert "data.train_on: all" in problem.fix
    assert len(tokenise(write(rows, prompt_template=TEMPLATE, train_on="all"), words)[0]) == 1


def test_a_tokenizer_without_an_end_is_refused_unless_no_end_is_asked_for(write: Any, words: Any) -> None:
    endless = copy.deepcopy(words)
    endless.eos_token = None
    problem = refusal(write([{"text": "w01 w02"}]), endless)
    assert "no end-of-sequence token" in problem.what
    assert "append_eos: false" in problem.fix
    assert len(tokenise(write([{"text": "w01 w02"}], append_eos=False), endless)[0]) == 1


def test_a_val_split_is_a_part_of_its_own(write: Any, words: Any) -> None:
    section = write([{"text": f"w{n:02d} w01"} for n in range(10)])
    rows, counts = tokenise_split(section, "train[90%:]", "data.val_split", words)
    assert counts.rows == 1
    assert words.decode(rows[0]["input_ids"]) == "w09 w01 </s>"
