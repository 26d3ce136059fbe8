from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from shardtune.config.schema import DataSection
from shardtune.data.source import check_dataset_path, read_split, require_columns
from shardtune.errors import UserInputError

TEN = [{"text": f"row {n}"} for n in range(10)]


def section(name: object, **settings: str) -> DataSection:
    return DataSection(dataset_name_or_path=str(name), **settings)


def texts(name: object, split: str = "train") -> list[object]:
    return list(read_split(section(name), split, "data.train_split")["text"])


def refusal(name: object, split: str = "train", **settings: str) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        read_split(section(name, **settings), split, "data.val_split")
    return caught.value


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train", "validation", "test"):
        jsonl(tmp_path / "three" / f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(4)])
    return tmp_path / "three"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "list.json", "a.csv", "a.parquet", "a.txt", "A.JSONL"])
def test_each_format_gives_the_rows_as_they_were_written(tmp_path: Path, name: str) -> None:
    wanted = ["one two", 'comma, "quoted"', "größe 👍 \\n"]
    rows = datasets.Dataset.from_dict({"text": wanted})
    path = tmp_path / name
    if name == "list.json":
        path.write_text(json.dumps([{"text": text} for text in wanted], indent=1), encoding="utf-8")
    elif name.lower().endswith((".jsonl", ".json")):
        jsonl(path, list(rows))
    elif name.endswith(".csv"):
        rows.to_csv(path)
    elif name.endswith(".parquet"):
        rows.to_parquet(path)
    else:
        path.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    assert texts(path) == wanted


def test_windows_line_ends_and_a_byte_order_mark_are_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a b"}\r\n{"text": "c"}\r\n')
    (tmp_path / "a.txt").write_bytes(b"a b\r\nc\r\n")
    assert texts(tmp_path / "a.jsonl") == texts(tmp_path / "a.txt") == ["a b", "c"]


def test_a_csv_cell_is_the_text_that_stands_there(tmp_path: Path) -> None:
    for path in (tmp_path / "a.csv", tmp_path / "folder" / "train.csv"):
        path.parent.mkdir(exist_ok=True)
        path.write_text('text,n\nNA,007\nNone,1.50\n"two\nlines",2\n,3\n', encoding="utf-8")
    for name in ("a.csv", "folder"):
        rows = read_split(section(tmp_path / name), "train", "data.train_split")
        assert list(rows["text"]) == ["NA", "None", "two\nlines", None]
        assert list(rows["n"]) == ["007", "1.50", "2", "3"]


def test_files_of_a_folder_are_splits_by_their_names(folder: Path) -> None:
    for split in ("train", "validation", "test"):
        assert texts(folder, split) == [f"{split} {n}" for n in range(4)]


def test_slices_of_one_file_share_no_row_and_miss_none(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEN)
    assert texts(path, "train[:90%]") + texts(path, "train[90%:]") == texts(path)
    assert texts(path, "train[90%:]") == ["row 9"]


@pytest.mark.parametrize("kind", ["single", "dict"])
def test_folders_written_by_datasets_are_read_with_slices_too(tmp_path: Path, kind: str) -> None:
    rows = datasets.Dataset.from_list(TEN)
    saved = rows if kind == "single" else datasets.DatasetDict(train=rows, validation=rows.select([3]))
    saved.save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved") == [row["text"] for row in TEN]
    assert texts(tmp_path / "saved", "train[:20%]") == ["row 0", "row 1"]
    assert texts(tmp_path / "saved", "train[-1:]+train[:1]") == ["row 9", "row 0"]
    if kind == "dict":
        assert texts(tmp_path / "saved", "validation") == ["row 3"]
    problem = refusal(tmp_path / "saved", "nope")
    assert "has no split 'nope'" in problem.what
    assert "train" in problem.why
    assert "data.val_split" in problem.fix


def test_a_tilde_means_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(texts("~/three")) == len(texts("~/three/train.jsonl")) == 4


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", TEN)
    assert len(texts(path)) == 10
    jsonl(path, TEN[:3])
    assert len(texts(path)) == 3


@pytest.mark.parametrize("split", ["dev", "dev[:10%]"])
def test_an_unknown_split_names_those_there_are(folder: Path, split: str) -> None:
    problem = refusal(folder, split)
    assert problem.exit_code == 2
    assert f"has no split '{split}'" in problem.what
    assert str(folder) in problem.what
    assert problem.why == "It has: train, validation, test."
    assert "data.val_split" in problem.fix


def test_a_single_file_has_a_train_split_only(tmp_path: Path) -> None:
    problem = refusal(jsonl(tmp_path / "validation.jsonl", TEN), "validation")
    assert "has no split 'validation'" in problem.what
    assert "train" in problem.why


@pytest.mark.parametrize("split", ["train[abc]", "train[", "train[:5%"])
def test_a_slice_that_cannot_be_read_is_told_with_its_key(folder: Path, split: str) -> None:
    problem = refusal(folder, split)
    assert split in problem.why
    assert "data.val_split" in problem.fix


@pytest.mark.parametrize("split", ["train[50:60]", "train[:0%]"])
def test_a_slice_without_rows_is_told(folder: Path, split: str) -> None:
    problem = refusal(folder, split)
    assert f"'{split}'" in problem.what
    assert "no rows" in problem.what
    assert "data.val_split" in problem.fix


@pytest.mark.parametrize("name", ["a.jsonl", "list.json", "lines.json"])
@pytest.mark.parametrize("inside_folder", [False, True])
def test_a_broken_line_is_named_with_its_file(tmp_path: Path, name: str, inside_folder: bool) -> None:
    where = tmp_path / "folder"
    where.mkdir()
    rows = [json.dumps({"text": "x" * 50}) for _ in range(30_000)]  # more than pyarrow reads at once
    rows[29_000] = '{"text": "y" "z"}'
    text = "[" + ",\n".join(rows) + "]" if name == "list.json" else "\n".join(rows)
    (where / name).write_text(text, encoding="utf-8")
    problem = refusal(where if inside_folder else where / name)
    assert f"{where / name}, line 29001: Expecting ',' delimiter" in problem.why
    assert "well formed" in problem.fix


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n["b"]\n', encoding="utf-8")
    assert "a.jsonl, line 2: not an object" in refusal(tmp_path / "a.jsonl").why


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow"])
def test_a_file_that_is_not_what_its_ending_says_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'a,b\n1,"2\n' if name == "a.csv" else b"this is neither of them")
    problem = refusal(tmp_path / name)
    assert "could not be read" in problem.what
    assert name in problem.what
    assert problem.why
    assert problem.fix


def test_files_with_different_columns_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "train.jsonl", [{"text": "a"}])
    jsonl(tmp_path / "d" / "test.jsonl", [{"other": "a"}])
    problem = refusal(tmp_path / "d")
    assert "other" in problem.why
    assert "same columns" in problem.fix


@pytest.mark.parametrize("where", ["nope.jsonl", "./nope", "../nope", "/nope/nope", "~/nope", "a/b/c"])
def test_a_path_that_does_not_exist_is_told_without_asking_the_hub(where: str) -> None:
    with pytest.raises(UserInputError) as caught:
        check_dataset_path(section(where))
    assert f"'{where}' does not exist" in caught.value.what
    assert "the hub is not asked" in caught.value.why
    assert "data.dataset_name_or_path" in caught.value.fix


def test_an_unknown_ending_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"x")
    problem = refusal(tmp_path / "a.xlsx")
    assert "'.xlsx'" in problem.what
    assert ".jsonl" in problem.fix


@pytest.mark.parametrize("where", ["empty.jsonl", "folder"])
def test_empty_files_are_told(tmp_path: Path, where: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").touch()
    (tmp_path / "empty.jsonl").touch()
    problem = refusal(tmp_path / where)
    assert "is empty" in problem.what
    assert "data.dataset_name_or_path" in problem.fix


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "text\n")])
def test_a_file_without_rows_is_told(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert "no rows" in refusal(tmp_path / name).what


def test_a_folder_without_data_is_told(tmp_path: Path) -> None:
    problem = refusal(tmp_path)
    assert str(tmp_path) in problem.what
    assert "doesn't contain any data files" in problem.why


def test_a_folder_with_a_loading_script_is_told(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text("x = 1")
    assert "scripts are no longer supported" in refusal(tmp_path / "set").why


def test_a_hub_name_without_a_network_fails_at_once_and_says_what_else_works() -> None:
    problem = refusal("some-org/some-dataset")
    assert "'some-org/some-dataset' was not found" in problem.what
    assert "No file or folder of that name is here" in problem.why
    assert "local file or folder" in problem.fix


def test_an_unknown_configuration_lists_those_there_are(folder: Path) -> None:
    problem = refusal(folder, dataset_config_name="wrong")
    assert "default" in problem.why
    assert "data.dataset_config_name" in problem.fix


def test_a_missing_column_is_told_with_those_there_are() -> None:
    rows = datasets.Dataset.from_list([{"question": "a", "answer": "b"}])
    require_columns(rows, ["question", "answer"], "data.prompt_template", "train")
    with pytest.raises(UserInputError) as caught:
        require_columns(rows, ["question", "reply"], "data.prompt_template", "train")
    assert "split 'train' has no column 'reply', which data.prompt_template names" in caught.value.what
    assert "question, answer" in caught.value.why
    assert "data.prompt_template" in caught.value.fix
