"""Files with something wrong in them, through the command line: an answer that names it, never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from toys import toy_chat_llama

from shardtune.cli.main import main

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD = {"messages": [USER, ANSWER]}
NINES = "9" * 5000
NOISE = bytes(range(128, 256)) * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_chat_llama(tmp_path_factory.mktemp("model"))


class Inspect:
    """`shardtune data inspect` in this process, from an empty cache: a new process would need seconds for each file."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self.model, self.monkeypatch, self.capsys = folder, model, monkeypatch, capsys
        monkeypatch.setenv("SHARDTUNE_CACHE", str(folder / "cache"))
        monkeypatch.setenv("COLUMNS", "300")

    def __call__(self, data: Path | list[str], **settings: Any) -> tuple[int, str]:
        """(exit code, what was printed on one line)."""
        config = self.folder / "run.yaml"
        sections = {
            "model": {"model_name_or_path": str(self.model)},
            "data": {
                "dataset_name_or_path": data if isinstance(data, list) else str(data),
                "max_length": 128,
                **settings,
            },
        }
        config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        self.monkeypatch.setattr(sys, "argv", ["shardtune", "data", "inspect", str(config)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = self.capsys.readouterr()
        return int(ended.value.code or 0), " ".join((said.out + said.err).split())


@pytest.fixture
def inspect(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Inspect:
    return Inspect(tmp_path, model, monkeypatch, capsys)


def rows(*values: Any) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in values).encode()


def chat(*messages: Any, **columns: Any) -> bytes:
    return rows({"messages": list(messages), **columns})


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        # Values
        ("a.jsonl", rows({"text": "a b"}, {"text": [1]}), "a.jsonl:2 cannot be used. why: Column 'text' contains a list"),
        ("a.jsonl", rows({"text": {"a": 1}}), "The column 'text' contains values of type dict, not text."),
        ("a.jsonl", rows({"text": True}), "Column 'text' contains a bool, not text: True"),
        ("a.jsonl", rows('{"text": Infinity}'), "Column 'text' contains a float, not text: inf"),
        ("a.jsonl", rows({"text": None}, {"text": None}), "No row of the split 'train' is left to train on (2 were read)."),
        ("a.jsonl", rows('{"text": NaN}'), "1 were empty or a single token. fix: Check the columns that are read (text)"),
        ("a.jsonl", rows({"text": "a b"}, f'{{"text": {NINES}}}'), "a.jsonl:2 cannot be used. why: Exceeds the limit (4300"),
        ("a.json", f'[{{"text": "a b"}},\n {{"text": {NINES}}}]'.encode(), "a.json:2 cannot be used. why: Exceeds the limit"),
        ("a.jsonl", b'{"text":' + b"[" * 9999 + b"]" * 9999 + b"}", "a.jsonl:1: Nested too deeply"),
        ("a.jsonl", b'{"text":"a \\ud83d"}', "escape \\ud83d is half of a pair"),
        ("a.json", b'[{"text":"a \\ud83d"}]', "escape \\ud83d is half of a pair, which is not a character: a ? fix: Remove the escape"),
        ("a.jsonl", rows({"prompt": "x", "completion": ["y"]}), "The column 'completion' contains values of type list"),
        ("a.jsonl", rows({}, {}), "The columns are: none."),
        # Conversations
        ("a.jsonl", chat(), "The column 'messages' does not contain messages. why: The first is a list: []"),
        ("a.jsonl", rows(GOOD, {"messages": []}), "a.jsonl:2 cannot be used. why: The conversation has no messages"),
        ("a.jsonl", rows({"messages": "hello"}), "The column 'messages' does not contain messages. why: The first is a str: hello"),
        ("a.jsonl", rows({"messages": ["hello"]}), "does not contain messages. why: The first is a list: ['hello']"),
        ("a.jsonl", rows(GOOD, {"messages": 5}), "a.jsonl:2 cannot be used. why: The conversation is a int, not a list"),
        ("a.csv", f'messages\n"[{NINES}]"\n'.encode(), "The column 'messages' does not contain messages."),
        ("a.jsonl", chat({"role": 1, "content": "x"}, ANSWER), "Message 1 has the role 1, which is not a string"),
        ("a.jsonl", chat({"role": None, "content": "x"}, ANSWER), "Message 1 has no role"),
        ("a.jsonl", rows({"conversations": [{"from": 3, "value": "x"}]}), "Message 1 is from 3, which is not one of human"),
        ("a.jsonl", chat({"role": "user", "content": 5}, ANSWER), "The content of message 1 is a int, not text"),
        ("a.jsonl", chat({"role": "user", "content": [1]}, ANSWER), "The content of message 1 has a part of type None"),
        ("a.jsonl", chat(USER, {**ANSWER, "tool_calls": 5}), "The field tool_calls of message 2 is a int, not a list"),
        ("a.jsonl", chat(USER, {**ANSWER, "weight": "1"}), "Message 2 has the weight '1'; only 0"),
        ("a.jsonl", chat(USER, ANSWER, tools=5), "The tools column is a int, not a list"),
        ("a.jsonl", chat(USER, ANSWER, tools=json.loads("[" * 900 + "]" * 900)), "Nested too deeply"),
        # Tables
        ("a.csv", b"text,text\na,b\n", "a.csv' has more than one column named 'text'."),
        ("a.csv", b"prompt,completion\na,b\nc\n", "a.csv:3 cannot be used. why: 1 cells, but the header has 2: c"),
        ("a.csv", b"prompt,completion\na,b\nc,d,e\n", "3 cells, but the header has 2 (a cell that contains ',' must be quoted)"),
        ("a.csv", b'prompt,completion\n"a,b\n', 'a.csv:2: A quoted cell (") is not closed.'),
        ("a.csv", b"prompt,completion\n", "The split 'train' of the dataset"),
        ("a.csv", b"\n\n", "has no rows."),
        ("a.csv", b"a;b|c\n1;2|3\n", "a.csv' is ambiguous: semicolons or vertical bars."),
        ("a.csv", "prompt,completion\nä,b\n".encode("latin1"), "Not UTF-8: byte 0xe4 in column 'prompt'"),
        # Files
        ("a.jsonl", b"", "is empty."),
        ("a.jsonl", b"\n \n", "has no rows."),
        ("a.csv", rows(GOOD), "a.csv' holds JSON, not CSV."),
        ("a.jsonl", b"text\na b\n", "a.jsonl:1: Expecting value (column 1): text"),
        ("a.parquet", rows(GOOD), "Parquet magic bytes not found"),
        ("a.jsonl", b"PAR1\x15\x04" + NOISE, "it is a parquet file. fix: Rename it to .parquet."),
        ("a.csv", b"PK\x03\x04" + NOISE, "it is a zip archive (or .xlsx). fix: Unpack it, or save the sheet as .csv."),
        ("a.jsonl", gzip.compress(rows(GOOD), mtime=0), "it is compressed with gzip. fix: Add .gz to its name."),
        ("a.csv", "text\na\n".encode("utf-16"), "it is encoded as UTF-16. fix: Save it as UTF-8"),
        ("a.csv", "text\na\n".encode("utf-16-le"), "is encoded as UTF-16. why: Every other byte is NUL. fix: Save it as UTF-8 (for example: iconv -f utf-16le"),
        ("a.jsonl", rows(GOOD, GOOD).decode().encode("utf-16-be"), "iconv -f utf-16be"),
        ("a.jsonl", rows(GOOD, GOOD).replace(b"\n", b"\r"), "lines end in \\r alone"),
        ("a.jsonl", json.dumps(GOOD, indent=1).encode(), "indented over several lines: { fix: Write one object per line"),
        ("a.jsonl.gz", gzip.compress(rows(GOOD) * 99, mtime=0)[:30], "Truncated compressed stream"),
        ("a.jsonl.gz", NOISE, "it is not compressed with gzip. fix: Remove .gz from its name"),
        ("a.txt", NOISE, "a.txt:1: Not UTF-8: byte 0x80 at column 1"),
        ("a.csv", NOISE + b"\n" + NOISE, "a.csv:1: The header is not UTF-8."),
        ("a.json", NOISE, "a.json:1: Expecting value (column 1)"),
        ("a.arrow", NOISE, "could not be read."),
        ("a.json", b"5", "a.json:1: Not an object with named columns: 5"),
        ("a.xlsx", b"PK", "has the extension '.xlsx', which is not a supported data format."),
        ("a", rows(GOOD), "has the extension '', which is not a supported data format."),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told(
    inspect: Inspect, tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, said = inspect(tmp_path / name)
    assert told in said
    assert code == 2
    assert re.search(r" fix: \S", said)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", said)  # nothing of a file acts on the terminal


def test_what_is_wrong_with_a_parquet_file_is_told(inspect: Inspect, tmp_path: Path) -> None:
    def refused(table: pa.Table) -> str:
        parquet.write_table(table, tmp_path / "a.parquet")
        code, said = inspect(tmp_path / "a.parquet")
        assert code == 2
        return said

    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    assert "has more than one column named 'text'" in refused(twice)
    assert "of type bytes, not text" in refused(pa.table({"text": pa.array([b"ab\xff"])}))
    assert "of type Decimal, not text" in refused(pa.table({"text": pa.array([1], pa.decimal128(9, 2))}))
    assert "has no rows" in refused(pa.table({"text": pa.array([], pa.string())}))
    assert "has no rows" in refused(pa.table({}))
    assert "The first is a dict" in refused(pa.table({"messages": [{"role": "user", "content": "x"}]}))


def test_folders_pipes_and_dead_links_are_told(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dir.jsonl").mkdir()
    (tmp_path / "dead.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, told in (
        ("empty", "doesn't contain any data files"),
        ("dir.jsonl", "doesn't contain any data files"),
        ("dead.jsonl", "does not exist"),
        ("pipe.jsonl", "is neither a regular file nor a folder"),
    ):
        code, said = inspect(tmp_path / name)
        assert (code, told in said) == (2, True), said


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + rows({"text": "a b"}).replace(b"\n", b"\r\n"), "text (column 'text')"),
        ("a.csv", b"\xef\xbb\xbf\r\ntext\r\na b\r\n", "text (column 'text')"),
        ("a.jsonl", b'[{"text": "a b"},\n{"text": "c d"}]', "text (column 'text')"),
        ("a.jsonl", rows({"prompt": "1+1", "completion": 2, "id": 10**40}), "columns 'prompt' and 'completion'"),
        ("a.jsonl", chat({"role": "user", "content": None}, {"role": "assistant", "content": "a"}), "OpenAI"),
        ("a.csv", b"prompt;completion\n1,5;2\n\"a;b\";c\n", "columns 'prompt' and 'completion'; cells are separated by semicolons"),
        ("a.csv", b"prompt\tcompletion\na\tb\nc\td\n", "cells are separated by tabs"),
        ("a.tsv", b"prompt\tcompletion\na\tb\n", "cells are separated by tabs"),
        ("a.csv", b"prompt;completion\na;b\nc;d\ne;f\ng\n", "a.csv:5 cannot be used. why: 1 cells, but the header has 2"),
        ("a.csv", b"text\na;b;c\n", "text (column 'text')"),  # a sign that the header does not have separates nothing
        ("a.csv", b"prompt,completion\na;b;c,d|e\n", "prompt-completion (columns 'prompt' and 'completion') "),
    ],
)  # fmt: skip
def test_what_is_only_unusual_is_read(inspect: Inspect, tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    code, said = inspect(tmp_path / name)
    assert told in said
    assert code == (2 if "cannot be used" in told else 0)


def test_conversations_without_an_assistant_turn_get_advice_about_that(inspect: Inspect, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(chat(USER, {"role": "bot", "content": "b"}) * 3)
    code, said = inspect(path)
    assert code == 2
    assert "3 had no supervised assistant turn." in said
    assert "a non-empty turn with the role assistant (ShareGPT format: gpt)" in said
    assert "The roles in the data are: user, bot." in said
    assert "text_field" not in said
    path.write_bytes(chat(USER) + rows(GOOD))
    code, said = inspect(path)
    assert code == 0
    assert "1 training row dropped: no supervised assistant turn." in said


def test_files_of_a_folder_that_are_not_read_are_named(inspect: Inspect, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(rows({"text": "a b"}))
    (folder / "validation.jsonl").write_bytes(rows({"text": "c d"}))
    assert "not read" not in inspect(folder)[1]
    (folder / "train.csv").write_text("text\ne f\n")
    assert "text (column 'text'; files not read: train.csv)" in inspect(folder)[1]


def test_a_file_of_the_folder_that_is_not_read_though_it_has_the_columns_is_a_warning(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "set"
    data.mkdir()
    (data / "b.jsonl").write_bytes(rows(*[{"text": f"a b {number}"} for number in range(9)]))
    (data / "README.txt").write_text("about")
    assert "no problems found" in inspect(data)[1]
    (data / "a.csv").write_text("text\nx\n")
    code, said = inspect(data)
    assert code == 0 and "no problems found" not in said
    assert f"warning: 1 file with the columns of the data is not read: {data / 'a.csv'}." in said
    monkeypatch.chdir(tmp_path)
    for other in (str(data / "a.csv"), "set/a.csv", "./set/../set/a.csv"):
        _, said = inspect(["set", other])
        assert "is not read" not in said, other


@pytest.mark.parametrize("row", ["nothing", '{"text": "a \\ud83d"}'])
def test_where_every_row_is_skipped_the_reason_of_the_first_is_told_and_skipping_is_not_advised(
    inspect: Inspect, tmp_path: Path, row: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows(row, row))
    code, said = inspect(tmp_path / "a.jsonl", on_error="skip")
    assert code == 2 and "No row of the split 'train'" in said
    assert re.search(r"a\.jsonl:1: (Expecting value|its text contains a lone surrogate)", said)
    assert "data.on_error: skip needs at least one" in said and "set data.on_error" not in said
