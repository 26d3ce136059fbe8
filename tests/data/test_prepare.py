from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from running import REPOSITORY

from shardtune.config.schema import DataSection, SourceSection
from shardtune.data.checks import ModelLimits, refusals_and_warnings
from shardtune.data.prepare import PreparedSet, ProgressInfo, prepare
from shardtune.data.prepared import Prepared
from shardtune.data.tokens import IGNORED
from shardtune.errors import UserInputError

TEMPLATE = "{q} => {a}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(section: DataSection, tokenizer: Any, seed: int = 1, **settings: Any) -> PreparedSet:
    return prepare(section, seed, tokenizer, "toy", **settings)


def refusal(section: DataSection, tokenizer: Any) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        made(section, tokenizer)
    return caught.value


def decoded(prepared: Prepared | None, tokenizer: Any) -> list[str]:
    assert prepared is not None
    return [tokenizer.decode(prepared.row(n)[0]) for n in range(len(prepared))]


def learnt(prepared: Prepared, number: int, tokenizer: Any) -> str:
    return tokenizer.decode([label for label in prepared.row(number)[1] if label != IGNORED])


def jsonl(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def word_rows(count: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    return [
        {"q": " ".join(f"w{rng.randrange(60):02d}" for _ in range(rng.randint(2, 9))), "a": f"w{n % 60:02d}", "id": n}
        for n in range(count)
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


# What rows become


def test_rows_are_rendered_masked_and_counted(write: Any, words: Any) -> None:
    section = write([{"q": "w01 w02", "a": "w03"}, {"q": "w04", "a": "w05"}], prompt_template=TEMPLATE)
    found = made(section, words)
    assert decoded(found.train, words) == ["w01 w02 => w03 </s>", "w04 => w05 </s>"]
    assert learnt(found.train, 0, words) == "w03 </s>"
    counts = found.train.counts
    assert (counts.read, counts.rows, counts.tokens, counts.supervised, counts.without_eos) == (2, 2, 9, 4, 0)
    assert counts.largest_id == max(words.convert_tokens_to_ids(["w05"]))
    assert found.val is None
    assert found.choice.name == "prompt"
    assert not found.from_cache


def test_what_is_left_out_is_counted_and_why(write: Any, words: Any) -> None:
    rows: list[dict] = [
        {"q": "w01 w02 w03 w04", "a": "w05"},  # the answer lies behind max_length
        {"q": "w01", "a": "w02 w03 w04"},  # cut
        {"q": "w01", "a": None},
        {"q": "w01"},
        {"q": "w01", "a": "w02"},
        {"q": "w01", "a": "w02"},
    ]
    counts = made(write(rows, prompt_template=TEMPLATE, max_length=4), words).train.counts
    assert (counts.read, counts.rows, counts.cut) == (6, 3, 1)
    assert (counts.dropped_unsupervised, counts.dropped_short, counts.duplicates, counts.without_eos) == (1, 2, 1, 1)


def test_a_null_in_a_prompt_column_keeps_the_row(tmp_path: Path, words: Any) -> None:
    path = tmp_path / "a.csv"
    path.write_text("q,more,a\nw01,,w02\n,w03,w04\nw05,w06,\n", encoding="utf-8")
    section = DataSection(dataset_name_or_path=str(path), prompt_template="{q} {more} => {a}")
    found = made(section, words)
    assert decoded(found.train, words) == ["w01 => w02 </s>", "w03 => w04 </s>"]
    [finding] = refusals_and_warnings(found, words, ModelLimits(None))
    assert finding.what == "1 training row (33 %) dropped as empty."
    assert "The column 'a' is missing, null or blank; first in " in finding.why
    assert str(path) in finding.why


def test_what_is_noticed_in_conversations_is_kept_with_the_set(write: Any) -> None:
    def said(*turns: tuple[str, str | None]) -> dict:
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    rows = [
        said(("user", "hi"), ("assistant", "ho")),
        {"id": 3},
        said(("user", "hi"), ("assistant", None), ("user", "hi"), ("assistant", "ho")),
        said(("user", "hi"), ("assistant", "ho"), ("user", "hi"), ("asistant", "ho")),
    ]
    section = write(rows * 2)
    tokenizer = chat_tokenizer("chatml")
    made(section, tokenizer)
    found = made(section, tokenizer)
    assert found.from_cache
    seen = {(r.kind, r.detail): (r.rows, r.first.rpartition(":")[2]) for r in found.train.counts.remarks}
    assert seen == {("empty row", ""): (2, "2"), ("empty turn", ""): (2, "3"), ("unknown role", "asistant"): (2, "4")}
    told = " ".join(finding.what for finding in refusals_and_warnings(found, tokenizer, ModelLimits(None)))
    assert "2 training rows (25 %) dropped" in told
    assert "unknown role 'asistant'" in told


def test_a_chat_template_for_rows_that_are_no_conversations_is_refused(write: Any, words: Any) -> None:
    problem = refusal(write([{"text": "w01 w02"}], chat_template="chatml"), words)
    assert problem.what == "data.chat_template is set, but the data format is text."


def test_long_rows_are_cut_dropped_or_split_as_asked(write: Any, words: Any) -> None:
    rows = [{"text": "w01 w02"}, {"text": "w01 w02 w03 w04 w05"}]
    cut = made(write(rows, max_length=4), words).train
    assert decoded(cut, words) == ["w01 w02 </s>", "w01 w02 w03 w04"]
    assert (cut.counts.cut, cut.counts.split, cut.counts.dropped_long) == (1, 0, 0)
    dropped = made(write(rows, max_length=4, long_rows="drop"), words).train
    assert decoded(dropped, words) == ["w01 w02 </s>"]
    assert (dropped.counts.cut, dropped.counts.split, dropped.counts.dropped_long) == (0, 0, 1)
    split = made(write(rows, max_length=4, long_rows="split"), words).train
    assert decoded(split, words) == ["w01 w02 </s>", "w01 w02 w03 w04", "w05 </s>"]
    assert (split.counts.cut, split.counts.split, split.counts.dropped_long) == (0, 1, 0)
    assert split.counts.read == 2


def test_parts_of_a_split_row_that_predict_nothing_are_dropped(write: Any, words: Any) -> None:
    rows = [{"q": "w01 w02 w03 w04", "a": "w05 w06 w07"}]  # 4 | => and the answer | its end
    prepared = made(write(rows, prompt_template=TEMPLATE, max_length=4, long_rows="split"), words).train
    assert decoded(prepared, words) == ["=> w05 w06 w07"]
    assert (prepared.counts.dropped_unsupervised, prepared.counts.dropped_short, prepared.counts.split) == (1, 1, 1)


def test_no_row_left_says_how_many_were_read_and_why_they_went(write: Any, words: Any) -> None:
    rows: list[dict] = [{"q": "w01 w02 w03", "a": "w04"}, {"q": "w01", "a": None}]
    problem = refusal(write(rows, prompt_template=TEMPLATE, max_length=3), words)
    assert "No row of the split 'train' is left" in problem.what
    assert "2 were read" in problem.what
    assert "1 were empty" in problem.why
    assert "1 had no supervised token" in problem.why
    assert "data.max_length" in problem.fix


def test_chat_rows_are_prepared_with_their_end_of_turn(write: Any, words: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(words)
    tokenizer.chat_template = "{% for m in messages %}{{ ' w00 ' if m['role'] == 'user' else ' => ' }}{{ m['content'] }}{{ ' </s>' }}{% endfor %}"
    rows = [{"messages": [{"role": "user", "content": "w01"}, {"role": "assistant", "content": "w02"}]}]
    found = made(write(rows), tokenizer)
    assert found.choice.name == "chat"
    assert learnt(found.train, 0, tokenizer) == "w02 </s>"


# What the rows are


CHAT = [{"role": "user", "content": "w01 w02"}, {"role": "assistant", "content": "w03"}]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": CHAT}, "chat"),
        ({"messages": CHAT, "text": "w09"}, "chat"),
        ({"prompt": "w01", "completion": "w02"}, "prompt-completion"),
        ({"prompt": "w01", "completion": "w02", "text": "w09"}, "prompt-completion"),
        ({"text": "w01 w02"}, "text"),
    ],
)
def test_the_format_is_the_same_whether_defaults_were_left_out_or_written_and_whoever_filled_the_cache(
    row: dict, name: str, write: Any, tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer("chatml")
    short = write([row, row])
    written = DataSection.model_validate(short.model_dump())
    cold = [
        made(each.model_copy(update={"cache_dir": str(tmp_path / str(n))}), tokenizer)
        for n, each in enumerate((short, written))
    ]
    assert [each.choice.name for each in cold] == [name, name]
    assert not cold[1].from_cache
    assert cold[0].train.counts == cold[1].train.counts
    for first, second in ((short, written), (written, short)):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        made(first, tokenizer)
        warm = made(second, tokenizer)
        assert warm.from_cache
        assert (warm.choice, warm.train.counts) == (cold[0].choice, cold[0].train.counts)


def test_the_cache_is_named_after_the_format_that_was_found(
    write: Any, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = write([{"prompt": "w01", "completion": "w02", "text": "w03 w04"}])
    pair = made(section, words)
    monkeypatch.setattr("shardtune.data.formats._PAIR", ("question", "reply"))  # as another version might detect
    text = made(section, words)
    assert (pair.choice.name, text.choice.name) == ("prompt-completion", "text")
    assert not text.from_cache
    assert pair.folder != text.folder


def test_a_space_before_the_answer_is_told_with_what_it_means_at_inference(
    write: Any, bytes_bpe: Any, words: Any
) -> None:
    rows = [{"q": "what is", "a": "the answer"}]
    merged = made(write(rows, prompt_template="{q} {a}"), bytes_bpe)
    assert bytes_bpe.decode(merged.train.row(0)[1][merged.train.row(0)[1] != IGNORED][:1]).startswith(" ")
    assert merged.choice.why.endswith(
        "; the space before the answer is part of the answer's first token, so prompts at inference must end without it"
    )
    apart = made(write([{"q": "what is", "a": "~"}], prompt_template="{q} {a}"), bytes_bpe)
    assert "the space before the answer is a separate token" in apart.choice.why
    for template, tokenizer in (("{q}\n{a}", bytes_bpe), ("{q}{a}", bytes_bpe), ("{q} {a}", words)):
        assert "space" not in made(write(rows, prompt_template=template), tokenizer).choice.why
    pair = made(write([{"prompt": "what is ", "completion": "the answer"}]), bytes_bpe)
    assert "the space before the answer is part of" in pair.choice.why


# Errors in the data


def test_a_broken_line_stops_with_its_place_and_the_line(tmp_path: Path, words: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w01 w02"}\n{"text": w03}\n{"text": "w04 w05"}\n')
    problem = refusal(DataSection(dataset_name_or_path=str(tmp_path / "a.jsonl")), words)
    assert f"{tmp_path / 'a.jsonl'}:2" in problem.what
    assert '{"text": w03}' in problem.why
    assert "data.on_error: skip" in problem.fix


def test_broken_rows_are_skipped_with_their_places_when_asked(tmp_path: Path, words: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "w01 w02"}\n{"text": w03}\n{"text": "\xe9"}\n["x"]\n{"text": [1]}\n{"text": "\\ud83d w01"}\n{"text": "w04 w05"}\n'
    )
    prepared = made(DataSection(dataset_name_or_path=str(tmp_path / "a.jsonl"), on_error="skip"), words).train
    assert decoded(prepared, words) == ["w01 w02 </s>", "w04 w05 </s>"]
    counts = prepared.counts
    assert (counts.read, counts.rows, counts.skipped_errors) == (7, 2, 5)
    assert [error.split(": ")[0] for error in counts.errors] == [f"{tmp_path / 'a.jsonl'}:{n}" for n in range(2, 7)]
    for error, told in zip(
        counts.errors, ["Expecting value", "0xe9", "not an object", "list", "surrogate"], strict=True
    ):
        assert told in error


def test_rows_behind_many_broken_ones_are_found(tmp_path: Path, words: Any) -> None:
    (tmp_path / "a.jsonl").write_text("# made by hand\n" * 500 + '{"text": "w01 w02"}\n')
    section = DataSection(dataset_name_or_path=str(tmp_path / "a.jsonl"), on_error="skip")
    assert decoded(made(section, words).train, words) == ["w01 w02 </s>"]


def test_only_the_first_few_errors_are_kept(tmp_path: Path, words: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w01 w02"}\n' + "{\n" * 500)
    counts = made(DataSection(dataset_name_or_path=str(tmp_path / "a.jsonl"), on_error="skip"), words).train.counts
    assert counts.skipped_errors == 500
    assert len(counts.errors) == 10


def test_the_first_error_in_the_file_is_told_however_many_workers_there_are(tmp_path: Path, words: Any) -> None:
    rows = [json.dumps({"text": "w01 " * 100}) for _ in range(6000)]
    rows[3000] = rows[5000] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with pytest.raises(UserInputError) as caught:
        made(DataSection(dataset_name_or_path=str(tmp_path / "a.jsonl")), words, workers=2)
    assert f"{tmp_path / 'a.jsonl'}:3001" in caught.value.what


# Validation


def test_a_share_is_held_out_by_content_whatever_the_order_the_seed_and_other_columns(
    tmp_path: Path, words: Any
) -> None:
    rows = word_rows(1000)
    kwargs: dict[str, Any] = {"prompt_template": TEMPLATE, "val_split": 0.1}
    first = made(DataSection(dataset_name_or_path=jsonl(tmp_path / "a.jsonl", rows), **kwargs), words, seed=1)
    shuffled = random.Random(5).sample([{**row, "id": -row["id"]} for row in rows], len(rows))
    second = made(DataSection(dataset_name_or_path=jsonl(tmp_path / "b.jsonl", shuffled), **kwargs), words, seed=2)
    assert first.val is not None
    assert second.val is not None
    assert 60 <= len(first.val) <= 140
    assert len(first.train) + len(first.val) == 1000
    assert sorted(decoded(first.val, words)) == sorted(decoded(second.val, words))
    assert first.train.counts.read + first.val.counts.read == 1000


def test_rows_that_say_the_same_go_to_the_same_side(tmp_path: Path, words: Any) -> None:
    rows = [{"q": row["q"], "a": row["a"], "id": n} for n in range(3) for row in word_rows(200)]
    section = DataSection(
        dataset_name_or_path=jsonl(tmp_path / "a.jsonl", rows), prompt_template=TEMPLATE, val_split=0.2
    )
    found = made(section, words)
    assert not set(decoded(found.train, words)) & set(decoded(found.val, words))
    assert found.overlap == 0


def test_validation_rows_that_stand_in_train_too_are_counted(tmp_path: Path, words: Any) -> None:
    jsonl(tmp_path / "d" / "train.jsonl", [{"text": f"w01 w{n:02d}"} for n in range(10)])
    jsonl(tmp_path / "d" / "validation.jsonl", [{"text": f"w01 w{n:02d}"} for n in (3, 3, 50)])
    found = made(DataSection(dataset_name_or_path=str(tmp_path / "d"), val_split="validation"), words)
    assert found.val is not None
    assert found.overlap == 2
    assert decoded(found.val, words) == ["w01 w03 </s>", "w01 w03 </s>", "w01 w50 </s>"]
    assert found.val.counts.read == 3


def test_a_share_that_leaves_one_side_empty_is_refused(write: Any, words: Any) -> None:
    rows = [{"text": "w01 w02"}]
    small, large = refusal(write(rows, val_split=0.0001), words), refusal(write(rows, val_split=0.9999), words)
    assert "leaves no row for validation" in small.what
    assert "leaves no row for training" in large.what


def test_an_unknown_validation_split_is_told_with_its_key(write: Any, words: Any) -> None:
    problem = refusal(write([{"text": "w01 w02"}], val_split="dev"), words)
    assert "no split 'dev'" in problem.what
    assert "data.val_split" in problem.fix


# Mixtures


def mixture(tmp_path: Path, weights: tuple[float, float], **settings: Any) -> DataSection:
    for number, name in enumerate(("a", "b")):
        jsonl(tmp_path / name / "train.jsonl", [{"text": f"w{number:02d} w{n:02d}"} for n in range(40)])
    jsonl(tmp_path / "b" / "validation.jsonl", [{"text": "w59 w58"}])
    sources = [SourceSection(path=str(tmp_path / name), weight=w) for name, w in zip("ab", weights, strict=True)]
    return DataSection(dataset_name_or_path=list(sources), **settings)


def test_a_weight_repeats_or_draws_the_rows_of_its_source(tmp_path: Path, words: Any) -> None:
    found = made(mixture(tmp_path, (2, 0.5)), words)
    texts = decoded(found.train, words)
    assert len(texts) == 100
    assert all(texts.count(f"w00 w{n:02d} </s>") == 2 for n in range(40))
    drawn = [text for text in texts if text.startswith("w01")]
    assert len(set(drawn)) == len(drawn) == 20
    assert found.train.counts.tokens == 300
    assert found.train.counts.duplicates == 0


def test_which_rows_are_drawn_depends_on_the_seed_and_nothing_else(tmp_path: Path, words: Any) -> None:
    section = mixture(tmp_path, (1, 1.5))
    texts = {seed: sorted(decoded(made(section, words, seed=seed).train, words)) for seed in (1, 2)}
    assert texts[1] != texts[2]
    again = mixture(tmp_path, (1, 1.5), cache_dir=str(tmp_path / "other"))
    assert sorted(decoded(made(again, words, seed=1).train, words)) == texts[1]


def test_a_mixture_is_validated_on_the_sources_that_have_the_split(tmp_path: Path, words: Any) -> None:
    found = made(mixture(tmp_path, (1, 1), val_split="validation"), words)
    assert decoded(found.val, words) == ["w59 w58 </s>"]
    assert "no split 'nope'" in refusal(mixture(tmp_path, (1, 1), val_split="nope"), words).what


def test_each_source_of_a_mixture_has_the_format_of_its_own_rows(tmp_path: Path, words: Any) -> None:
    text = jsonl(tmp_path / "a.jsonl", [{"text": "w01 w02"}])
    pair = jsonl(tmp_path / "b.jsonl", [{"prompt": "w03 ", "completion": "w04"}])
    found = made(DataSection(dataset_name_or_path=[text, pair]), words)
    assert decoded(found.train, words) == ["w01 w02 </s>", "w03 w04 </s>"]
    assert learnt(found.train, 1, words) == "w04 </s>"
    assert [source["format"]["name"] for source in found.about["sources"]] == ["text", "prompt-completion"]


# Corpora


def corpus(tmp_path: Path, *files: str, **settings: Any) -> DataSection:
    names = []
    for number, text in enumerate(files):
        (tmp_path / f"{number}.txt").write_text(text)
        names.append(str(tmp_path / f"{number}.txt"))
    name = names[0] if len(names) == 1 else str(tmp_path / "*.txt")
    return DataSection(dataset_name_or_path=name, **settings)


def test_lines_of_a_corpus_are_joined_into_stretches_with_one_end_per_file(tmp_path: Path, words: Any) -> None:
    found = made(corpus(tmp_path, "w01 w02\n\n \nw03\nw04 w05\n", "w06 w07\n", max_length=3), words)
    assert decoded(found.train, words) == ["w01 w02 w03", "w04 w05 </s>", "w06 w07 </s>"]
    assert found.train.manifest["concatenate"] is True
    assert found.train.counts.dropped_short == 0
    assert found.train.counts.read == 6
    assert found.train.row(0)[1].tolist() == found.train.row(0)[0].tolist()


def test_lines_keep_their_breaks_and_the_begin_stands_once_per_file(tmp_path: Path, begins: Any) -> None:
    prepared = made(corpus(tmp_path, "the answer\nis\n\nforty\n", max_length=1000), begins).train
    assert decoded(prepared, begins) == ["<s>the answer\nis\nforty\n</s>"]


def test_stretches_have_exactly_max_length_but_for_the_last(tmp_path: Path, bytes_bpe: Any) -> None:
    text = REPOSITORY.parent / "shared" / "data" / "wikitext-2" / "valid.txt"
    if not text.is_file():
        pytest.skip("needs WikiText")
    content = "\n".join(text.read_text(encoding="utf-8").split("\n")[:400])
    found = made(corpus(tmp_path, content, max_length=256, val_split=0.1), bytes_bpe)
    assert found.val is not None
    lengths = np.concatenate([found.train.lengths, found.val.lengths])
    assert set(lengths[lengths != 256]) and (lengths != 256).sum() == 1
    assert abs(len(found.val) / len(lengths) - 0.1) < 0.05
    joined = "".join(line + "\n" for line in content.split("\n") if line.strip())
    whole = made(corpus(tmp_path, content, max_length=256), bytes_bpe).train
    assert bytes_bpe.decode(np.concatenate([whole.row(n)[0] for n in range(len(whole))])) == joined + "</s>"


def test_rows_with_line_breaks_of_their_own_are_joined_as_in_wikitext(write: Any, words: Any) -> None:
    rows = [{"text": text} for text in ("", " w01 \n", "", " w02 w03 \n", " w04 \n")]
    assert decoded(made(write(rows, max_length=3), words).train, words) == ["w01 w02 w03", "w04 </s>"]
    assert len(made(write(rows, max_length=3, concatenate=False), words).train) == 3


def test_short_documents_are_left_alone_unless_asked_and_then_keep_their_ends(write: Any, words: Any) -> None:
    rows = [{"text": "w01 w02"}, {"text": "w03"}]
    assert decoded(made(write(rows), words).train, words) == ["w01 w02 </s>", "w03 </s>"]
    joined = made(write(rows, concatenate=True, max_length=4), words).train
    assert decoded(joined, words) == ["w01 w02 </s> w03"]  # its end alone would predict nothing
    assert joined.counts.dropped_short == 1


@pytest.mark.parametrize("blank", ["", None])
def test_blank_rows_among_short_documents_do_not_make_a_corpus_of_them(write: Any, words: Any, blank: Any) -> None:
    rows = [{"text": "w01 w02"}, {"text": blank}] * 9
    found = made(write(rows), words)
    assert decoded(found.train, words) == ["w01 w02 </s>"] * 9
    assert found.train.counts.dropped_short == 9
    assert "joined" not in found.choice.why


def test_the_format_line_says_that_rows_are_joined(tmp_path: Path, write: Any, words: Any) -> None:
    lines = made(corpus(tmp_path, "w01 w02\nw03\n", max_length=3), words).choice.why
    assert "rows are concatenated" in lines
    assert "set data.concatenate: false" in lines
    asked = made(write([{"text": "w01 w02"}] * 2, concatenate=True), words).choice.why
    assert "an end token after each row" in asked


def test_conversations_cannot_be_joined(write: Any, words: Any) -> None:
    problem = refusal(write([{"q": "w01", "a": "w02"}], prompt_template=TEMPLATE, concatenate=True), words)
    assert "data.concatenate" in problem.what
    assert "format is prompt" in problem.what


# Sources that `datasets` reads


@pytest.mark.parametrize("kind", ["parquet", "saved", "csv"])
def test_other_sources_give_the_same_tokens_as_jsonl(tmp_path: Path, words: Any, kind: str) -> None:
    rows = word_rows(1500)
    wanted = made(
        DataSection(dataset_name_or_path=jsonl(tmp_path / "a.jsonl", rows), prompt_template=TEMPLATE), words
    ).train
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / f"a.{kind}"
    {"parquet": table.to_parquet, "csv": table.to_csv, "saved": table.save_to_disk}[kind](path)
    found = made(DataSection(dataset_name_or_path=str(path), prompt_template=TEMPLATE), words).train
    for name in ("tokens.bin", "supervised.bin", "offsets.bin"):
        assert (found.folder / name).read_bytes() == (wanted.folder / name).read_bytes()


# Workers


@pytest.mark.parametrize("concatenate", [False, True])
def test_one_and_two_workers_write_the_same_bytes(tmp_path: Path, words: Any, concatenate: bool) -> None:
    rows = [{"text": f"{row['q']} {row['a']}", "pad": "x" * 200} for row in word_rows(4000)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    sections = [
        DataSection(dataset_name_or_path=path, val_split=0.1, concatenate=concatenate, cache_dir=str(tmp_path / str(n)))
        for n in (1, 2)
    ]
    alone, together = (made(section, words, workers=n) for n, section in enumerate(sections, start=1))
    assert together.folder != alone.folder
    assert files_of(alone.folder) == files_of(together.folder)
    assert len(files_of(alone.folder)) == 11


def test_small_data_starts_no_workers_and_large_data_one_per_core(
    tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def spy(recipes: Any, tasks: Any, workers: int) -> Any:
        asked.append(workers)
        return process_in_order(recipes, tasks, 1)

    from shardtune.data.workers import process_in_order

    monkeypatch.setattr("shardtune.data.prepare.process_in_order", spy)
    monkeypatch.setattr("shardtune.data.prepare.usable_cores", lambda: 7)
    for count in (1900, 2100):
        made(
            DataSection(dataset_name_or_path=jsonl(tmp_path / f"{count}.jsonl", word_rows(count)), text_field="q"),
            words,
        )
    assert asked == [1, 7]


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_not_run_again_by_the_workers(tmp_path: Path, words: Any) -> None:
    words.save_pretrained(tmp_path / "tokenizer")
    path = jsonl(tmp_path / "a.jsonl", word_rows(100))
    script = tmp_path / "script.py"
    script.write_text(
        "print('ran')\n"
        "from transformers import AutoTokenizer\n"
        "from shardtune.config.schema import DataSection\n"
        "from shardtune.data.prepare import prepare\n"
        f"section = DataSection(dataset_name_or_path={path!r}, text_field='q', cache_dir={str(tmp_path / 'c')!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / 'tokenizer')!r})\n"
        "print(len(prepare(section, 0, tokenizer, 'x', workers=2).train))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=with_path(), timeout=120)
    assert done.stdout == "ran\n100\n", done.stderr


def with_path() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_worker_that_is_killed_is_told_as_such(tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtune.data import workers
    from shardtune.errors import ShardtuneError

    monkeypatch.setattr(workers, "_work", _die)
    section = DataSection(dataset_name_or_path=jsonl(tmp_path / "a.jsonl", word_rows(10)), text_field="q")
    with pytest.raises(ShardtuneError) as caught:
        made(section, words, workers=2)
    assert "was killed" in caught.value.what
    assert "memory" in caught.value.why


def _die(number: int, chunk: Any) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_progress_is_told_and_ends_with_all(tmp_path: Path, words: Any) -> None:
    told: list[ProgressInfo] = []
    section = DataSection(
        dataset_name_or_path=jsonl(tmp_path / "a.jsonl", word_rows(3000)), text_field="q", val_split="train[:10]"
    )
    made(section, words, workers=1, progress=told.append)
    assert list(dict.fromkeys(info.step for info in told)) == ["checking", "train", "val"]
    last = [info for info in told if info.step == "train"][-1]
    assert last.share == 1
    assert last.rows == 3000
    assert last.tokens > 3000
    assert last.seconds_left == 0


# A prepared set as the source


def test_a_prepared_set_can_be_copied_and_named_as_the_dataset(tmp_path: Path, write: Any, words: Any) -> None:
    section = write([{"text": "w01 w02"}, {"text": "w03 w04"}], val_split=0.5)
    folder = made(section, words).folder
    folder.rename(tmp_path / "copied")
    Path(section.dataset_name_or_path).unlink()
    there = section.model_copy(update={"dataset_name_or_path": str(tmp_path / "copied")})
    found = made(there, words)
    assert found.from_cache
    assert found.folder == tmp_path / "copied"
    assert sorted([*decoded(found.train, words), *decoded(found.val, words)]) == ["w01 w02 </s>", "w03 w04 </s>"]


def test_a_prepared_set_of_other_settings_or_another_tokenizer_is_refused(
    write: Any, words: Any, bytes_bpe: Any
) -> None:
    section = write([{"text": "w01 w02"}])
    folder = str(made(section, words).folder)
    other = refusal(DataSection(dataset_name_or_path=folder, max_length=77), words)
    assert "other settings" in other.what
    assert "max_length 1024 there and 77 here" in other.why
    problem = refusal(DataSection(dataset_name_or_path=folder), bytes_bpe)
    assert "another tokenizer" in problem.what
    assert "toy" in problem.why


def test_the_length_that_would_have_been_enough_is_remembered(tmp_path: Path, toy_model: Path) -> None:
    from shardtune.config.schema import ModelSection
    from shardtune.model.load import load_tokenizer

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join(["w01"] * n)}) + "\n" for n in range(1, 101)))
    section = DataSection(
        dataset_name_or_path=str(file),
        format="text",
        concatenate=False,
        max_length=20,
        cache_dir=str(tmp_path / "cache"),
    )
    tokenizer = load_tokenizer(ModelSection(model_name_or_path=str(toy_model)))
    made = prepare(section, 0, tokenizer, "toy")
    assert made.train.manifest["uncut_p95"] == 96  # 95 words and the end token
    assert made.train.counts.cut == 81
