from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from shardtune.config.schema import DataSection
from shardtune.data.formats import FormatChoice, Rendered, choose_format, renderer
from shardtune.data.tokens import IGNORED, Encoded, Encoder
from shardtune.errors import UserInputError

TEMPLATE = "{q} => {a}"
TEXT = FormatChoice("text", "", ("text",))
CHAT = FormatChoice("chat", "", ("messages",))


def encode(rows: list[dict], tokenizer: Any, **settings: Any) -> list[Encoded]:
    section = DataSection(dataset_name_or_path="x", **settings)
    choice = choose_format(section, list(rows[0]), rows)
    render = renderer(section, choice, tokenizer)
    encoded = Encoder(section, tokenizer, choice).encode([render(row) for row in rows])
    assert all(len(row.ids) == len(row.labels) for row in encoded)
    return encoded


def refusal(tokenizer: Any, choice: FormatChoice = TEXT, **settings: Any) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        Encoder(DataSection(dataset_name_or_path="x", **settings), tokenizer, choice)
    return caught.value


def learnt(row: Encoded, tokenizer: Any) -> str:
    """The text of the tokens that carry loss."""
    return tokenizer.decode([label for label in row.labels if label != IGNORED])


def hidden(row: Encoded, tokenizer: Any) -> str:
    return tokenizer.decode([t for t, label in zip(row.ids, row.labels, strict=True) if label == IGNORED])


def test_only_the_answer_and_the_end_carry_loss(words: Any) -> None:
    [row] = encode([{"q": "w01 w02", "a": "w03 w04"}], words, prompt_template=TEMPLATE)
    ids = words.convert_tokens_to_ids(["w01", "w02", "=>", "w03", "w04", "</s>"])
    assert row == Encoded(ids, [IGNORED] * 3 + ids[3:])


def test_all_tokens_carry_loss_when_asked_or_without_a_template(words: Any) -> None:
    rows = [{"q": "w01 w02", "a": "w03", "text": "w01 w02 => w03"}]
    [asked] = encode(rows, words, prompt_template=TEMPLATE, train_on="all")
    [plain] = encode(rows, words)
    assert asked == plain
    assert plain.labels == plain.ids
    assert len(plain.ids) == 5


def test_what_follows_the_last_column_belongs_to_the_answer(words: Any) -> None:
    [row] = encode([{"q": "w01", "a": "w02"}], words, prompt_template="{q} => {a} w59")
    assert learnt(row, words) == "w02 w59 </s>"


def test_no_end_is_appended_when_not_asked(words: Any) -> None:
    [row] = encode([{"q": "w01", "a": "w02"}], words, prompt_template=TEMPLATE, append_eos=False)
    assert learnt(row, words) == "w02"


def test_an_end_that_stands_in_the_data_is_not_doubled(words: Any) -> None:
    [row] = encode([{"q": "w01", "a": "w02 </s>"}], words, prompt_template=TEMPLATE)
    assert learnt(row, words) == "w02 </s>"


@pytest.mark.parametrize("kind", ["words", "bytes_bpe", "begins", "begins_and_ends"])
@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_the_end_is_there_once_and_learnt_whether_or_not_the_tokenizer_adds_it(
    request: pytest.FixtureRequest, kind: str, train_on: Any
) -> None:
    tokenizer = request.getfixturevalue(kind)
    [row] = encode([{"q": "w01", "a": "w02"}], tokenizer, prompt_template=TEMPLATE, train_on=train_on)
    assert row.ids.count(tokenizer.eos_token_id) == 1
    assert row.labels[-1] == row.ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["begins", "begins_and_ends"])
@pytest.mark.parametrize("template", ["{q} => {a}", "<s>{q} => {a}", "{a}"])
def test_the_begin_is_there_once_and_not_learnt(request: pytest.FixtureRequest, kind: str, template: str) -> None:
    tokenizer = request.getfixturevalue(kind)
    [row] = encode([{"q": "the", "a": "answer"}], tokenizer, prompt_template=template)
    assert row.ids.count(tokenizer.bos_token_id) == 1
    assert (row.ids[0], row.labels[0]) == (tokenizer.bos_token_id, IGNORED)
    assert learnt(row, tokenizer).lstrip() == "answer</s>"


def test_a_begin_written_in_plain_text_is_not_doubled(begins: Any) -> None:
    [row] = encode([{"text": "<s>the answer"}], begins)
    assert row.ids.count(begins.bos_token_id) == 1
    assert begins.decode(row.ids) == "<s>the answer</s>"


def test_a_token_that_straddles_the_seam_is_learnt(bytes_bpe: Any) -> None:
    [row] = encode([{"q": "what is", "a": "answer"}], bytes_bpe, prompt_template="{q} the {a}")
    tokens = bytes_bpe.convert_ids_to_tokens(row.ids)
    assert tokens[-2] == "Ġanswer"  # the space is the prompt's, the word the answer's
    assert hidden(row, bytes_bpe) == "what is the"
    assert learnt(row, bytes_bpe) == " answer</s>"


@pytest.mark.parametrize("kind", ["bytes_bpe", "begins", "begins_and_ends"])
def test_any_text_is_masked_up_to_the_byte_where_the_answer_starts(request: pytest.FixtureRequest, kind: str) -> None:
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
    rows = encode(data, tokenizer, prompt_template=template)
    assert len(rows) == len(data)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for row, source in zip(rows, data, strict=True):
        prompt = f"{source['q']}:".encode()
        pairs = list(zip(row.ids, row.labels, strict=True))
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


def test_numbers_become_their_text(bytes_bpe: Any) -> None:
    [row] = encode([{"q": 12, "a": 2.5}], bytes_bpe, prompt_template="{q}={a}")
    assert bytes_bpe.decode(row.ids) == "12=2.5</s>"


def test_an_end_in_the_data_and_one_of_the_tokenizers_own_are_one(begins_and_ends: Any) -> None:
    [row] = encode([{"q": "what", "a": "answer</s>"}], begins_and_ends, prompt_template=TEMPLATE)
    assert learnt(row, begins_and_ends) == " answer</s>"


def test_the_end_alone_is_not_learnt_behind_an_empty_answer(words: Any, begins_and_ends: Any) -> None:
    for tokenizer in (words, begins_and_ends):
        [row] = encode([{"q": "w01", "a": ""}], tokenizer, prompt_template=TEMPLATE)
        assert row == Encoded([], [])


@pytest.mark.parametrize("kind", ["words", "bytes_bpe", "begins_and_ends"])
def test_empty_null_and_blank_rows_have_no_tokens_however_many_a_blank_has(
    request: pytest.FixtureRequest, kind: str
) -> None:
    rows: list[dict] = [{"text": text} for text in ("w01", "", None, "  \n ", "w02")]
    tokenizer = request.getfixturevalue(kind)
    encoded = encode(rows, tokenizer)
    assert [bool(row.ids) for row in encoded] == [True, False, False, False, True]
    assert "w02" in tokenizer.decode(encoded[-1].ids)


def test_a_null_cell_is_not_trained_on_as_the_word_none(words: Any) -> None:
    rows: list[dict] = [
        {"q": "w01", "a": "w02"},
        {"q": None, "a": "w02"},
        {"q": "", "a": "w02"},
        {"q": "w01", "a": None},
    ]
    _, null, empty, unanswered = encode(rows, words, prompt_template=TEMPLATE)
    assert null == empty
    assert learnt(null, words) == "w02 </s>"
    assert unanswered == Encoded([], [])


@pytest.mark.parametrize("kind", ["begins", "begins_and_ends"])
def test_a_begin_is_not_learnt_even_where_all_is(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer = request.getfixturevalue(kind)
    [row] = encode([{"text": "the answer"}], tokenizer)
    assert learnt(row, tokenizer) == "the answer</s>"


def test_an_end_that_only_the_tokenizer_adds_is_not_learnt_when_no_end_is_asked_for(begins_and_ends: Any) -> None:
    [row] = encode([{"q": "what is", "a": "the answer"}], begins_and_ends, prompt_template=TEMPLATE, append_eos=False)
    assert learnt(row, begins_and_ends) == " the answer"


def test_nothing_is_cut(words: Any) -> None:
    [row] = encode([{"text": " ".join(["w01"] * 5000)}], words, max_length=4)
    assert len(row.ids) == 5001


def test_each_span_is_learnt_and_what_lies_between_is_not(bytes_bpe: Any) -> None:
    encoder = Encoder(DataSection(dataset_name_or_path="x"), bytes_bpe, CHAT)
    text = "the answer is 👍🏽 what"
    spans = ((4, 10), (14, 16))
    [row] = encoder.encode([Rendered(text, spans, special=True)])
    assert bytes_bpe.decode(row.ids) == text
    assert learnt(row, bytes_bpe) == " answer👍🏽"


def test_the_end_of_a_span_ends_the_loss(words: Any) -> None:
    encoder = Encoder(DataSection(dataset_name_or_path="x"), words, CHAT)
    [inside, across] = encoder.encode([Rendered("w01 w02 w03", ((4, end),), special=True) for end in (7, 6)])
    assert learnt(inside, words) == "w02"
    assert learnt(across, words) == ""  # the token goes on behind the span


def test_text_with_its_own_special_tokens_gets_none_and_others_do(begins_and_ends: Any) -> None:
    encoder = Encoder(DataSection(dataset_name_or_path="x"), begins_and_ends, CHAT)
    rows = [
        Rendered("<s>the</s>", ((3, 10),), special=True),
        Rendered("the", ((0, 3),)),
        Rendered("is", (), special=True),
    ]
    encoded = encoder.encode(rows)
    assert [begins_and_ends.decode(row.ids) for row in encoded] == ["<s>the</s>", "<s>the</s>", "is"]
    assert [learnt(row, begins_and_ends) for row in encoded] == ["the</s>", "the</s>", ""]


def test_a_tokenizer_without_offsets_is_refused_for_masking_and_accepted_for_all(
    words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(words), "is_fast", False)
    prompt = FormatChoice("prompt", "", ("q", "a"))
    problem = refusal(words, prompt, prompt_template=TEMPLATE)
    assert "the tokens of the answer cannot be determined" in problem.what
    assert "data.train_on: all" in problem.fix
    assert "the assistant's turns" in refusal(words, CHAT).what
    [row] = encode([{"q": "w01", "a": "w02"}], words, prompt_template=TEMPLATE, train_on="all")
    assert len(row.ids) == 4


def test_a_tokenizer_without_an_end_is_refused_unless_no_end_is_asked_for(words: Any) -> None:
    endless = copy.deepcopy(words)
    endless.eos_token = None
    problem = refusal(endless)
    assert "no end-of-sequence token" in problem.what
    assert "append_eos: false" in problem.fix
    assert len(encode([{"text": "w01 w02"}], endless, append_eos=False)[0].ids) == 2
    Encoder(DataSection(dataset_name_or_path="x"), endless, CHAT)  # whose template ends its turns


def test_an_encoder_can_be_sent_to_another_process(begins: Any) -> None:
    encoder = Encoder(DataSection(dataset_name_or_path="x"), begins, TEXT)
    rows = [Rendered("the answer", ((0, 10),))]
    assert pickle.loads(pickle.dumps(encoder)).encode(rows) == encoder.encode(rows)
