"""Rows are those of the run's own pipeline, and the answer in each is what training supervised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from evaluated_run import fake_run
from toys import toy_chat_llama, toy_llama, toy_rows

from shardtune.data.tokens import IGNORED
from shardtune.errors import UserInputError
from shardtune.evaluation.evaluate import _answer_text
from shardtune.evaluation.rows import DataChoice, Question, Rows, question, read_rows, sample
from shardtune.inference.load import load_tuned_tokenizer
from shardtune.inference.source import find_tuned

N = IGNORED


def read(run: Path, *overrides: str, **choice: object) -> Rows:
    tuned = find_tuned(str(run))
    tokenizer = load_tuned_tokenizer(tuned, Path(tuned.base.model_name_or_path))
    return read_rows(tuned, DataChoice(overrides=overrides, **choice), tokenizer)  # type: ignore[arg-type]


def jsonl(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_last_supervised_stretch_is_the_answer() -> None:
    found = question(4, [5, 6, 7, 8, 2, 9, 9, 3, 2, 4], [N, N, 7, 8, 2, N, N, 3, 2, N], [2], may_be_cut=True)
    assert found == Question(4, (5, 6, 7, 8, 2, 9, 9), (3,))


@pytest.mark.parametrize(
    ("labels", "why"),
    [([N, N, N, N], "no answer"), ([5, 6, 7, 8], "no prompt"), ([N, 6, 7, 8], "answer cut off by data.max_length")],
)
def test_a_row_without_a_whole_answer_is_none(labels: list[int], why: str) -> None:
    assert question(0, [5, 6, 7, 8], labels, [2], may_be_cut=labels[0] == N) == why


def test_a_sample_is_seeded_sorted_and_not_the_first_rows() -> None:
    found = sample(1000, 20)
    assert found == sample(1000, 20) and list(found) == sorted(set(found)) and len(found) == 20
    assert found != tuple(range(20)) and max(found) > 500
    assert sample(5, 20) == sample(5, None) == (0, 1, 2, 3, 4)


def test_the_runs_own_validation_rows_are_the_default(toy_run: Path) -> None:
    rows = read(toy_run)
    assert rows.is_own and rows.split == "validation" and len(rows.chosen) == 35
    lines = (toy_run.parents[1] / "data" / "validation.jsonl").read_text().splitlines()
    assert len(rows.questions) == 35 and rows.ends == (2,)
    assert len(rows.questions[0].expected) == len(json.loads(lines[0])["answer"].split())


def test_another_file_is_read_as_the_runs_rows_are(toy_run: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "other.jsonl", [{"question": "w01 w02", "answer": "w02 w01"}])
    rows = read(toy_run, data=file)
    assert not rows.is_own and rows.split is None and rows.chosen == (0,)
    assert [len(rows.questions[0].prompt), len(rows.questions[0].expected)] == [3, 2]
    assert read(toy_run, data=str(toy_run.parents[1] / "data")).split == "validation"  # a folder has splits
    assert read(toy_run, data=str(toy_run.parents[1] / "data"), split="train").split == "train"


def test_what_the_template_has_behind_an_answer_is_not_part_of_it(tmp_path: Path) -> None:
    """<|endoftext|> ends an answer in some models, by its name; here it separates two parts of one."""
    model = toy_chat_llama(tmp_path / "model")
    rows = [{"q": f"number {n}", "a": f'{{"n": {n}}}<|endoftext|>more'} for n in range(4)]
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "validation"):
        jsonl(data / f"{name}.jsonl", rows)
    run = fake_run(tmp_path, model, data, prompt_template="{q}: {a}\n<|im_start|>", max_length=256)
    found = read(run)
    tokenizer = load_tuned_tokenizer(find_tuned(str(run)), model)
    assert tokenizer.eos_token == "<|im_end|>" and found.ends == (tokenizer.eos_token_id,)
    texts = [_answer_text(tokenizer, found, one.expected) for one in found.questions]
    assert texts == [row["a"] for row in rows]


def test_another_split_of_a_mixture_is_that_of_its_sources_each_row_once(tmp_path: Path) -> None:
    folders = [toy_rows(tmp_path / name, rows=6, val_rows=2, seed=n) for n, name in enumerate(("one", "two"))]
    (folders[0] / "test.jsonl").write_text((folders[0] / "validation.jsonl").read_text())
    sources = [{"path": str(folder), "split": "train", "weight": 3} for folder in folders]
    run = fake_run(tmp_path, toy_llama(tmp_path / "model"), tmp_path, dataset_name_or_path=sources)
    rows = read(run, split="test")
    assert rows.split == "test" and len(rows.chosen) == 2 and rows.name == str(folders[0])
    assert len(read(run, split="train").chosen) == 12
    with pytest.raises(UserInputError, match="no split 'nothing'"):
        read(run, split="nothing")


def test_answers_that_were_cut_are_not_asked_for(toy_run: Path, tmp_path: Path) -> None:
    long = " ".join(["w01"] * 30)
    file = jsonl(tmp_path / "long.jsonl", [{"question": "w01", "answer": long}, {"question": "w01", "answer": "w02"}])
    rows = read(toy_run, "data.max_length=10", data=file)
    assert rows.without_question == {"answer cut off by data.max_length": 1} and len(rows.questions) == 1
    assert rows.prepared.counts.cut == 1


def test_plain_text_and_whole_rows_have_no_answers(toy_run: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"question": "w01", "answer": "w02", "text": "w03 w04"}])
    assert "train_on: all" in read(toy_run, "data.train_on=all", data=file).no_answers
    assert "plain text" in read(toy_run, "data.format=text", "data.prompt_template=null", data=file).no_answers
    assert "append_eos" in read(toy_run, "data.append_eos=false", data=file).no_answers
    assert "long_rows" in read(toy_run, "data.long_rows=split", "data.max_length=3", data=file).no_answers


def test_a_conversation_ends_with_its_question(tmp_path: Path) -> None:
    said = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages = [{"role": role, "content": content} for role, content in said]
    (tmp_path / "data").mkdir()
    for name in ("train", "validation"):
        jsonl(tmp_path / "data" / f"{name}.jsonl", [{"messages": messages}])
    run = fake_run(
        tmp_path,
        toy_chat_llama(tmp_path / "model"),
        tmp_path / "data",
        prompt_template=None,
        format="chat",
        max_length=512,
    )
    rows = read(run)
    tuned = find_tuned(str(run))
    tokenizer = load_tuned_tokenizer(tuned, Path(tuned.base.model_name_or_path))
    asked = rows.questions[0]
    assert tokenizer.decode(asked.prompt).endswith("three<|im_end|>\n<|im_start|>assistant\n")
    assert "two" in tokenizer.decode(asked.prompt)
    assert tokenizer.decode(asked.expected) == "four"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in rows.ends


def test_what_is_wrong_is_said_with_the_option_for_it(toy_run: Path, tmp_path: Path) -> None:
    other = jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    blank = jsonl(tmp_path / "blank.jsonl", [{"question": "w01", "answer": ""}])
    for wanted, said in (
        ({"data": str(tmp_path / "nowhere.jsonl")}, "does not exist"),
        ({"data": other}, "lacks the columns 'question' and 'answer'"),
        ({"data": str(empty)}, "is empty"),
        ({"data": blank}, "No row"),
        ({"split": "test"}, "no split 'test'"),
    ):
        with pytest.raises(UserInputError, match=said):
            read(toy_run, **wanted)
    with pytest.raises(UserInputError) as refused:
        read(toy_run, data=other)
    assert "-o data.prompt_template=" in refused.value.fix
    with pytest.raises(UserInputError, match="only settings of `data`"):
        read(toy_run, "train.seed=3")


def test_a_path_that_is_relative_to_the_folder_of_the_training_is_said_to_be(
    toy_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = yaml.safe_load((toy_run / "config.yaml").read_text())
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(toy_run, copy)
    for path, why in (("./data", "is relative to the folder in which it was trained"), ("/no/data", "Looked at")):
        settings["data"]["dataset_name_or_path"] = path
        (copy / "config.yaml").write_text(yaml.safe_dump(settings))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserInputError, match=f"The dataset '{path}' does not exist") as refused:
            read(copy)
        assert why in refused.value.why and "--data" in refused.value.fix
    settings["data"]["dataset_name_or_path"] = "data"
    (copy / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(UserInputError, match="The dataset 'data' was not found") as refused:
        read(copy)
    assert "start the command in the folder in which it was trained" in refused.value.fix


def test_a_run_without_validation_rows_says_what_to_give(tmp_path: Path) -> None:
    run = fake_run(tmp_path, toy_llama(tmp_path / "model"), toy_rows(tmp_path / "data"), val_split=None)
    with pytest.raises(UserInputError, match="nothing to evaluate on") as refused:
        read(run)
    assert "--data" in refused.value.fix
    assert read(run, split="train").split == "train"


def test_an_adapter_without_a_run_needs_to_be_told_the_format(toy_run: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in (toy_run / "final").iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserInputError, match="is outside of any run") as refused:
        read(adapter)
    assert all(part in refused.value.fix for part in ("--data", "data.prompt_template", "data.max_length"))
    file = jsonl(tmp_path / "rows.jsonl", [{"question": "w01 w02", "answer": "w02 w01"}])
    told = read(adapter, "data.prompt_template={question} => {answer}", "data.max_length=64", data=file)
    assert len(told.questions) == 1
    with pytest.raises(UserInputError, match="max_lenght"):
        read(
            adapter, "data.prompt_template={question} => {answer}", "data.max_length=64", "data.max_lenght=3", data=file
        )
