from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pytest

from shardtune.config.schema import DataSection, SourceSection
from shardtune.data.chunks import BadRow, Chunk, location, rows_of
from shardtune.data.readers import DataFile
from shardtune.data.source import (
    Source,
    _splits_by_name,
    bad_row_error,
    check_dataset_path,
    has_split,
    open_split,
    sources_of,
    split_files,
    unread_data,
)
from shardtune.errors import UserInputError

TEN = [{"text": f"row {n}"} for n in range(10)]


def section(name: object, **settings: str) -> DataSection:
    return DataSection(dataset_name_or_path=str(name), **settings)


def read(name: object, split: str = "train", config_name: str | None = None) -> list[tuple[str, Any]]:
    """(place, row) of all rows."""
    opened = open_split(Source(str(name), config_name=config_name), split, "data.val_split")
    opened.sample(5)
    return [(location(chunk, number), row) for chunk in opened.chunks() for number, row in rows_of(chunk)]


def texts(name: object, split: str = "train") -> list[object]:
    return [row["text"] for _, row in read(name, split)]


def refusal(name: object, split: str = "train", config_name: str | None = None) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        read(name, split, config_name)
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


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.json",
        "list.json",
        "one_line.json",
        "a.csv",
        "a.parquet",
        "a.txt",
        "A.JSONL",
        "stream.arrow",
        "file.arrow",
        "a.jsonl.gz",
        "a.jsonl.zst",
        "list.json.gz",
        "a.csv.gz",
        "a.csv.zst",
        "a.txt.gz",
        "a.txt.zst",
    ],
)
def test_each_format_gives_the_rows_as_they_were_written(tmp_path: Path, name: str) -> None:
    wanted = ["one two", 'comma, "quoted"', "größe 👍 \\n"]
    path = tmp_path / name
    rows = datasets.Dataset.from_dict({"text": wanted})
    if name == "a.parquet":
        rows.to_parquet(path)
    elif name.endswith(".arrow"):
        table = rows.data.table
        new = pyarrow.ipc.new_stream if name.startswith("stream") else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as out, new(out, table.schema) as writer:
            writer.write_table(table)
    else:
        content = as_text(name, wanted).encode()
        codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
        with pyarrow.output_stream(str(path), compression=codec) as out:
            out.write(content)
    assert texts(path) == wanted


def as_text(name: str, wanted: list[str]) -> str:
    rows = [{"text": text} for text in wanted]
    if "list" in name:
        return json.dumps(rows, indent=1)
    if "one_line" in name:
        return json.dumps(rows)
    if ".json" in name.lower():
        return "".join(json.dumps(row) + "\n" for row in rows)
    if ".csv" in name:
        return "text\n" + "".join('"' + text.replace('"', '""') + '"\n' for text in wanted)
    return "\n".join(wanted) + "\n"


def test_windows_line_ends_and_a_byte_order_mark_are_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a b"}\r\n{"text": "c"}\r\n')
    (tmp_path / "a.txt").write_bytes(b"a b\r\nc\r\n")
    assert texts(tmp_path / "a.jsonl") == texts(tmp_path / "a.txt") == ["a b", "c"]


def test_a_csv_cell_is_the_text_that_stands_there(tmp_path: Path) -> None:
    for path in (tmp_path / "a.csv", tmp_path / "folder" / "train.csv"):
        path.parent.mkdir(exist_ok=True)
        path.write_text('text,n\nNA,007\nNone,1.50\n"two\nlines",2\n,3\n', encoding="utf-8")
    for name in ("a.csv", "folder"):
        rows = [row for _, row in read(tmp_path / name)]
        assert [row["text"] for row in rows] == ["NA", "None", "two\nlines", None]
        assert [row["n"] for row in rows] == ["007", "1.50", "2", "3"]


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


def test_dots_mean_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "notes").mkdir()
    for here, name in ((folder, "."), (folder, "./"), (folder / "notes", ".."), (tmp_path, "./three")):
        monkeypatch.chdir(here)
        assert texts(name, "validation") == [f"validation {n}" for n in range(4)], name


def test_a_folder_may_contain_the_script_of_its_name_that_made_the_data(folder: Path) -> None:
    (folder / f"{folder.name}.py").write_text("raise SystemExit('never run')")
    assert texts(folder, "validation") == [f"validation {n}" for n in range(4)]


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
def test_a_broken_line_is_named_with_its_file_and_shown(tmp_path: Path, name: str, inside_folder: bool) -> None:
    where = tmp_path / "folder"
    where.mkdir()
    rows = [json.dumps({"text": "x" * 50}) for _ in range(30_000)]  # several chunks
    rows[29_000] = '{"text": "y" "z"}'
    text = "[" + ",\n".join(rows) + "]" if name == "list.json" else "\n".join(rows)
    (where / name).write_text(text, encoding="utf-8")
    bad = [(at, row) for at, row in read(where if inside_folder else where / name) if isinstance(row, BadRow)]
    assert len(bad) == 1
    assert bad[0][0] == f"{where / name}:29001"
    assert "Expecting ',' delimiter (column 14)" in bad[0][1].message
    assert bad[0][1].shown.startswith('{"text": "y" "z"}')


def test_behind_a_broken_line_the_rest_is_read_and_behind_a_broken_element_of_a_list_it_is_told_that_it_is_not(
    tmp_path: Path,
) -> None:
    broken = ['{"text": "a"}', '{"text": }', '{"text": "c"}']
    (tmp_path / "a.jsonl").write_text("\n".join(broken), encoding="utf-8")
    (tmp_path / "b.json").write_text("[" + ",".join(broken) + "]", encoding="utf-8")
    assert [isinstance(row, BadRow) for _, row in read(tmp_path / "a.jsonl")] == [False, True, False]
    listed = [row for _, row in read(tmp_path / "b.json")]
    assert [isinstance(row, BadRow) for row in listed] == [False, True]
    assert "the rest of the file is not read" in listed[1].message


def test_a_list_that_is_not_closed_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"},\n{"text": "b"}', encoding="utf-8")
    rows = read(tmp_path / "a.json")
    assert [row["text"] for _, row in rows[:2]] == ["a", "b"]
    assert isinstance(rows[2][1], BadRow)


def test_a_list_without_line_breaks_is_read_in_pieces(tmp_path: Path) -> None:
    wanted = [f"{n} " + "é" * (n % 3000) for n in range(2000)]
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": text} for text in wanted], ensure_ascii=False), encoding="utf-8"
    )
    assert texts(tmp_path / "a.json") == wanted


def test_one_object_over_many_lines_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"text": "a"}, indent=4), encoding="utf-8")
    assert texts(tmp_path / "a.json") == ["a"]


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n["b"]\n', encoding="utf-8")
    at, row = read(tmp_path / "a.jsonl")[1]
    assert at.endswith("a.jsonl:2")
    assert row == BadRow("not an object with named columns", "['b']")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.json"])
def test_bytes_that_are_no_utf_8_are_told_and_the_rows_around_them_read(tmp_path: Path, name: str) -> None:
    rows = {"a.txt": "one\ncaf\xe9\ntwo\n", "a.csv": "text\none\ncaf\xe9\ntwo\n"}
    lines = [f'{{"text": "{text}"}}' for text in ("one", "caf\xe9", "two")]
    content = rows.get(name) or ("[" + ",\n".join(lines) + "]" if name == "a.json" else "\n".join(lines))
    (tmp_path / name).write_bytes(content.encode("latin1"))
    found = read(tmp_path / name)
    assert [row["text"] for _, row in found[::2]] == ["one", "two"]
    at, bad = found[1]
    assert at == f"{tmp_path / name}:{3 if name == 'a.csv' else 2}"
    assert "not UTF-8: byte 0xe9" in bad.message


def test_strings_of_a_parquet_file_that_are_no_utf_8_cost_their_row_only(tmp_path: Path) -> None:
    cells = pyarrow.array([b"one", b"caf\xe9", b"two"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": cells}), tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet")
    assert [row["text"] for _, row in found[::2]] == ["one", "two"]
    assert found[1][0] == f"{tmp_path / 'a.parquet'}, row 2"
    assert "byte 0xe9" in found[1][1].message


def test_what_is_said_about_a_broken_row() -> None:
    chunk = Chunk("d/a.jsonl", "jsonl", b"", 1)
    problem = bad_row_error(chunk, 7, BadRow("expecting value (column 10)", '{"text": }'))
    assert problem.what.startswith("d/a.jsonl:7 ")
    assert '{"text": }' in problem.why
    assert "data.on_error: skip" in problem.fix
    assert "iconv" in bad_row_error(chunk, 7, BadRow("not UTF-8: byte 0xe9")).fix


@pytest.mark.parametrize(("line", "told"), [("a,b,c", "3 cells, but the header has 2"), ('"a"b,c', "expected after")])
def test_a_csv_row_with_a_mistake_is_named_by_its_line_and_the_next_is_read(
    tmp_path: Path, line: str, told: str
) -> None:
    (tmp_path / "a.csv").write_text(f'text,n\n"two\nlines",1\n\n{line}\nlast,2\n', encoding="utf-8")
    found = read(tmp_path / "a.csv")
    assert [at.rpartition(":")[2] for at, _ in found] == ["2", "5", "6"]
    assert told in found[1][1].message
    assert found[2][1] == {"text": "last", "n": "2"}


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow"])
def test_a_file_that_is_not_what_its_ending_says_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'a,b\n1,"2\n' if name == "a.csv" else b"this is neither of them")
    problem = refusal(tmp_path / name)
    assert ("can be read" if name == "a.csv" else "could not be read") in problem.what
    assert name in problem.what
    assert problem.why
    assert problem.fix


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_is_told(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    with pyarrow.output_stream(str(path)) as out:  # compresses by the ending
        out.write("".join(json.dumps({"text": f"{n * 7919}"}) + "\n" for n in range(50_000)).encode())
    path.write_bytes(path.read_bytes()[:-1000])
    problem = refusal(path)
    assert "could not be read" in problem.what
    assert "runcated" in problem.why


def test_several_members_of_one_gzip_file_are_all_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    assert texts(tmp_path / "a.txt.gz") == ["one", "two"]


def test_each_split_of_a_folder_has_columns_of_its_own(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "train.jsonl", [{"text": "a"}])
    jsonl(tmp_path / "d" / "test.jsonl", [{"other": "a"}])
    assert texts(tmp_path / "d") == ["a"]


def test_a_glob_is_one_split_of_all_files_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b/2.jsonl", "a.jsonl", "b/c/3.jsonl", "b/1.jsonl.gz"):
        jsonl(tmp_path / "data" / name.removesuffix(".gz"), [{"text": name}])
    packed = tmp_path / "data" / "b" / "1.jsonl"
    (tmp_path / "data" / "b" / "1.jsonl.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    (tmp_path / "data" / "README.md").write_text("no data")
    assert texts(tmp_path / "data" / "*.jsonl") == ["a.jsonl"]
    assert texts(tmp_path / "data" / "b" / "*") == ["b/1.jsonl.gz", "b/2.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert texts("data/**/*.jsonl*") == ["a.jsonl", "b/1.jsonl.gz", "b/2.jsonl", "b/c/3.jsonl"]
    assert texts("data/**/*.jsonl*", "train[1:3]") == ["b/1.jsonl.gz", "b/2.jsonl"]


def test_a_glob_that_matches_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(UserInputError) as caught:
        check_dataset_path(section(tmp_path / "*"))
    assert "No data file matches" in caught.value.what
    assert ".jsonl" in caught.value.why


def test_a_url_is_read_through_fsspec_with_globs_and_compression() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/one.jsonl", b'{"text": "a"}\n')
    system.pipe("/bucket/two.jsonl.gz", gzip.compress(b'{"text": "b"}\n{"text": "c"}\n'))
    assert texts("memory://bucket/one.jsonl") == ["a"]
    assert texts("memory://bucket/*.jsonl*") == ["a", "b", "c"]
    assert texts("memory://bucket/two.jsonl.gz", "train[1:]") == ["c"]
    check_dataset_path(section("memory://bucket/nope.jsonl"))  # only asked for when it is read
    assert "could not be read" in refusal("memory://bucket/nope.jsonl").what
    assert "There is no data file at" in refusal("memory://bucket/*.csv").what


def test_a_parquet_file_behind_a_url_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list(TEN).to_parquet(tmp_path / "a.parquet")
    fsspec.filesystem("memory").pipe("/bucket/a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert texts("memory://bucket/a.parquet") == [row["text"] for row in TEN]


@pytest.mark.skipif("s3fs" in sys.modules, reason="needs a machine without s3fs")
def test_a_url_of_a_file_system_that_is_not_installed_says_what_to_install() -> None:
    problem = refusal("s3://bucket/a.jsonl")
    assert "s3fs" in problem.why
    assert "Install" in problem.fix


def test_a_mixture_has_sources_with_weights_splits_and_configurations_of_their_own() -> None:
    mixture = DataSection(
        dataset_name_or_path=["a.jsonl", SourceSection(path="b", weight=0.5, split="test", config_name="c")],
        dataset_config_name="d",
    )
    assert sources_of(mixture) == [Source("a.jsonl", 1.0, "d", None), Source("b", 0.5, "c", "test")]


def test_every_source_of_a_mixture_is_checked(tmp_path: Path) -> None:
    here = jsonl(tmp_path / "a.jsonl", TEN)
    with pytest.raises(UserInputError) as caught:
        check_dataset_path(DataSection(dataset_name_or_path=[str(here), {"path": str(tmp_path / "b.jsonl")}]))
    assert "b.jsonl' does not exist" in caught.value.what


def test_a_source_can_be_asked_whether_it_has_a_split(folder: Path) -> None:
    assert has_split(Source(str(folder)), "validation", "data.val_split")
    assert not has_split(Source(str(folder)), "dev", "data.val_split")
    with pytest.raises(UserInputError, match="does not exist"):
        has_split(Source(str(folder / "nope")), "dev", "data.val_split")


@pytest.mark.parametrize("split", ["train[300:700]", "train[-50:]", "train[10%:20%]", "train[700:]+train[:3]"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_slice_is_what_datasets_gives_and_keeps_the_places(tmp_path: Path, name: str, split: str) -> None:
    wanted = [f"{n} " + "x" * 700 for n in range(1111)]  # several chunks of each kind
    if name == "a.jsonl":  # with blank lines between, which are no rows
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n\n" for text in wanted))
    elif name == "a.parquet":
        datasets.Dataset.from_dict({"text": wanted}).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_text(("text\n" if name == "a.csv" else "") + "\n".join(wanted) + "\n")
    found = read(tmp_path / name, split)
    kind = {"a.jsonl": "json", "a.csv": "csv", "a.parquet": "parquet", "a.txt": "text"}[name]
    expected = datasets.load_dataset(kind, data_files=str(tmp_path / name), split=split)
    assert [row["text"] for _, row in found] == list(expected["text"])
    for at, row in found:
        number = int(row["text"].split()[0])
        line = {"a.jsonl": f":{2 * number + 1}", "a.csv": f":{number + 2}", "a.txt": f":{number + 1}"}
        assert at == f"{tmp_path / name}" + line.get(name, f", row {number + 1}")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    def peak(rows: int) -> int:
        path = tmp_path / str(rows) / name
        path.parent.mkdir()
        content = as_text("list" if name == "a.json" else name, ["x" * 1000] * rows).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        del content
        file = DataFile.of(str(path))
        assert file is not None
        tracemalloc.start()
        assert sum(1 for chunk in file.chunks() for _ in rows_of(chunk)) == rows
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(8000) < 1.5 * peak(2000) + 500_000


@pytest.mark.parametrize("where", ["nope.jsonl", "./nope", "../nope", "/nope/nope", "~/nope", "a/b/c"])
def test_a_path_that_does_not_exist_is_told_without_asking_the_hub(where: str) -> None:
    with pytest.raises(UserInputError) as caught:
        check_dataset_path(section(where))
    assert f"'{where}' does not exist" in caught.value.what
    assert "the Hub is not queried" in caught.value.why
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
    assert "There is no local file or folder of that name" in problem.why
    assert "local file or folder" in problem.fix


def test_an_unknown_configuration_lists_those_there_are(folder: Path) -> None:
    problem = refusal(folder, config_name="wrong")
    assert "default" in problem.why
    assert "data.dataset_config_name" in problem.fix


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "validation.jsonl"),
        ("a.jsonl", "b.jsonl"),
        ("a.jsonl", "validation.jsonl"),
        ("untrained.jsonl", "dev_1.jsonl"),
        ("training 1.jsonl", "my-test.jsonl.gz"),
        ("train_test.jsonl",),
        ("Train.jsonl", "val.jsonl"),
        ("train.jsonl", "test/a.jsonl"),
        ("big_train/a/b.jsonl", "valid2/c.jsonl"),
        (".train.jsonl", "__train/a.jsonl", "__train.jsonl", "config.json"),
    ],
)
def test_the_names_of_files_show_the_splits_that_datasets_finds(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        jsonl(tmp_path / "set" / name, TEN)
    builder = datasets.load_dataset_builder(str(tmp_path / "set")).config.data_files
    found = _splits_by_name(tmp_path / "set")
    assert found is not None
    assert {name: {file.name for file in files} for name, files in found.items()} == {
        str(name): set(files) for name, files in builder.items()
    }


@pytest.mark.parametrize("names", [("a.csv", "b.jsonl"), ("data/x-00000-of-00001.jsonl",), ("Train.JSONL",)])
def test_names_that_show_no_split_are_left_to_datasets(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        jsonl(tmp_path / name, TEN)
    assert _splits_by_name(tmp_path) is None


def test_splits_that_a_readme_declares_are_left_to_datasets(folder: Path) -> None:
    header = "configs: [{config_name: default, data_files: [{split: train, path: test.jsonl}]}]"
    (folder / "README.md").write_text(f"---\n{header}\n---\n", encoding="utf-8")
    files = split_files(Source(str(folder)), "train", "data.train_split")
    assert files is not None and [Path(file.name).name for file in files] == ["test.jsonl"]


@pytest.mark.parametrize("readme", [False, True])
def test_a_folder_without_data_is_refused_before_it_is_opened(tmp_path: Path, readme: bool) -> None:
    if readme:
        (tmp_path / "README.md").write_text("# Data", encoding="utf-8")
    with pytest.raises(UserInputError, match="contains no data files") as refused:
        check_dataset_path(section(tmp_path))
    assert ".jsonl" in refused.value.fix
    jsonl(tmp_path / "rows.jsonl", TEN)
    check_dataset_path(section(tmp_path))


def test_a_folder_of_files_in_capitals_says_what_to_rename(tmp_path: Path) -> None:
    jsonl(tmp_path / "Train.JSONL", TEN)
    problem = refusal(tmp_path)
    assert "Train.JSONL" in problem.fix and "lower-case" in problem.fix


def test_files_in_no_split_are_data_where_they_have_the_columns_that_are_read(tmp_path: Path) -> None:
    for data in ("train.jsonl", "more.jsonl", "config.json", ".hidden.jsonl", "__pycache__/x.jsonl"):
        jsonl(tmp_path / data, TEN)
    (tmp_path / "a.csv").write_text("text\nx\n", encoding="utf-8")
    (tmp_path / "other.csv").write_text("note\nx\n", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}, indent=1), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("anything", encoding="utf-8")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    files = [str(tmp_path / name) for name in ("a.csv", "more.jsonl", "notes.txt")]
    assert unread_data(Source(str(tmp_path)), ["text"], lines=False) == files[:2]
    assert unread_data(Source(str(tmp_path)), ["text"], lines=True) == files


def test_an_unknown_split_names_the_files_that_are_in_none(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", TEN)
    jsonl(tmp_path / "validation.jsonl", TEN)
    assert "Files in no split: rows.jsonl." in refusal(tmp_path).why
