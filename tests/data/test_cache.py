from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardtune.config.schema import DataSection, SourceSection
from shardtune.data import cache
from shardtune.data.prepare import PreparedSet, prepare
from shardtune.errors import UserInputError

ROWS = [{"text": f"w01 w{n:02d}"} for n in range(20)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prepared"


def made(section: DataSection, tokenizer: Any, seed: int = 1) -> PreparedSet:
    return prepare(section, seed, tokenizer, "toy")


def data(path: Path, rows: list[dict] = ROWS, **settings: Any) -> DataSection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DataSection(dataset_name_or_path=str(path), **settings)


def test_the_second_start_reads_nothing_but_the_files_content(
    tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = data(tmp_path / "a.jsonl")
    first = made(section, words)
    monkeypatch.setattr("shardtune.data.prepare.process_in_order", None)
    second = made(section, words)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.folder == first.folder
    assert second.train.counts == first.train.counts
    assert second.choice == first.choice


def test_the_same_content_elsewhere_is_found(tmp_path: Path, words: Any) -> None:
    made(data(tmp_path / "a.jsonl"), words)
    assert made(data(tmp_path / "b" / "c.jsonl"), words).from_cache
    folder = tmp_path / "d"
    data(folder / "train.jsonl")
    assert made(DataSection(dataset_name_or_path=str(folder)), words).from_cache


def test_what_changes_the_rows_makes_another_set(tmp_path: Path, words: Any, bytes_bpe: Any) -> None:
    section = data(tmp_path / "a.jsonl")
    made(section, words)
    changes: list[dict[str, Any]] = [
        {"max_length": 7}, {"append_eos": False}, {"long_rows": "drop"}, {"val_split": 0.5},
        {"train_split": "train[:5]"}, {"on_error": "skip"}, {"concatenate": True},
    ]  # fmt: skip
    for change in changes:
        assert not made(section.model_copy(update=change), words).from_cache, change
    assert not made(section, bytes_bpe).from_cache
    assert not made(data(tmp_path / "a.jsonl", [*ROWS[:-1], {"text": "w01 w20"}]), words).from_cache
    assert made(data(tmp_path / "a.jsonl"), words).from_cache


def test_a_chat_template_in_a_file_counts_by_what_it_says(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    section = DataSection(dataset_name_or_path="x", chat_template=str(template))
    template.write_text("{{ messages }}")
    before = cache.settings_of(section)
    template.write_text("{{ messages[0] }}")
    assert cache.settings_of(section) != before


def test_a_special_token_or_template_of_the_tokenizer_counts_and_what_it_was_last_asked_for_does_not(
    tmp_path: Path, words: Any
) -> None:
    import copy

    tokenizer = copy.deepcopy(words)
    before = cache.tokenizer_identity(tokenizer)
    tokenizer(["w01 w02 w03"], truncation=True, max_length=2, padding="max_length")
    assert cache.tokenizer_identity(tokenizer) == before == cache.tokenizer_identity(words)
    tokenizer.chat_template = "{{ messages }}"
    templated = cache.tokenizer_identity(tokenizer)
    tokenizer.eos_token = "w59"
    assert len({before, templated, cache.tokenizer_identity(tokenizer)}) == 3


def test_the_seed_matters_only_where_rows_are_drawn(tmp_path: Path, words: Any) -> None:
    path = str(data(tmp_path / "a.jsonl").dataset_name_or_path)
    for weight, again in ((1.0, True), (2.0, True), (0.5, False)):
        section = DataSection(dataset_name_or_path=[SourceSection(path=path, weight=weight)])
        made(section, words, seed=1)
        assert made(section, words, seed=2).from_cache == again


def test_where_prepared_sets_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = DataSection(dataset_name_or_path="x")
    assert cache.cache_folder(section) == tmp_path / "cache" / "prepared"
    assert cache.cache_folder(section.model_copy(update={"cache_dir": "/elsewhere"})) == Path("/elsewhere/prepared")
    monkeypatch.delenv("SHARDTUNE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder(section) == tmp_path / ".cache" / "shardtune" / "prepared"


def test_a_cached_set_that_was_damaged_is_made_again(tmp_path: Path, words: Any) -> None:
    section = data(tmp_path / "a.jsonl")
    first = made(section, words)
    wanted = (first.folder / "train" / "tokens.bin").read_bytes()
    (first.folder / "train" / "tokens.bin").write_bytes(wanted[:-4])
    second = made(section, words)
    assert not second.from_cache
    assert (second.folder / "train" / "tokens.bin").read_bytes() == wanted
    assert made(section, words).from_cache


def test_a_preparation_that_fails_leaves_nothing_behind(tmp_path: Path, words: Any, folder: Path) -> None:
    with pytest.raises(UserInputError):
        made(data(tmp_path / "a.jsonl", [{"text": ""}]), words)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path, words: Any) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserInputError) as caught:
        made(data(tmp_path / "a.jsonl", cache_dir=str(tmp_path / "file")), words)
    assert "Cannot write prepared data" in caught.value.what
    assert "data.cache_dir" in caught.value.fix


def test_on_a_disk_without_locks_it_is_prepared_all_the_same(
    tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(cache.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "lockf", refuse)
    section = data(tmp_path / "a.jsonl")
    assert not made(section, words).from_cache
    assert made(section, words).from_cache


def test_a_large_file_is_hashed_again_only_when_it_looks_touched(
    tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_REMEMBERED", 10)
    section = data(tmp_path / "a.jsonl")
    old = time.time() - 100
    os.utime(tmp_path / "a.jsonl", (old, old))
    made(section, words)
    hashed: list[Any] = []
    digest = cache.hashlib.file_digest
    monkeypatch.setattr(
        cache.hashlib, "file_digest", lambda stream, name: hashed.append(stream.name) or digest(stream, name)
    )
    assert made(section, words).from_cache
    mine = str(tmp_path / "a.jsonl")
    assert mine not in hashed
    data(tmp_path / "a.jsonl", ROWS[1:] + ROWS[:1])  # the same size
    assert not made(section, words).from_cache
    assert mine in hashed


# Crashes and company

SCRIPT = """
import sys, time
from pathlib import Path
from transformers import AutoTokenizer
from shardtune.config.schema import DataSection
from shardtune.data import prepare as module

data, tokenizer, go = sys.argv[1:]
finish = module._Job._write_set

def held(self, *args):
    print("filling", flush=True)
    while not Path(go).exists():
        time.sleep(0.05)
    finish(self, *args)

module._Job._write_set = held
told = set()

def tell(info):
    if info.step == "waiting" and "waiting" not in told:
        print("waiting", flush=True)
    told.add(info.step)

found = module.prepare(
    DataSection(dataset_name_or_path=data), 0, AutoTokenizer.from_pretrained(tokenizer), "x", workers=2, progress=tell
)
print("from cache" if found.from_cache else "made", len(found.train), flush=True)
"""


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A file without which preparers wait with a set that is almost whole."""
    return tmp_path / "go"


@pytest.fixture
def preparer(tmp_path: Path, words: Any, go: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    words.save_pretrained(tmp_path / "tokenizer")
    path = str(data(tmp_path / "a.jsonl", ROWS * 50).dataset_name_or_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, path, str(tmp_path / "tokenizer"), str(go)]
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
def test_a_killed_preparer_leaves_nothing_that_is_trusted_and_the_next_one_succeeds(
    preparer: Any, folder: Path, go: Path
) -> None:
    first = preparer()
    assert says(first) == "filling"
    first.kill()
    first.wait()
    assert [path.name.split("-")[0] for path in folder.iterdir() if path.is_dir()] == [".staging"]
    go.touch()
    second = preparer()
    assert [says(second), says(second)] == ["filling", "made 1000"]
    assert [path.name.startswith(".staging") for path in folder.iterdir() if path.is_dir()] == [False]
    deadline = time.monotonic() + 30  # its workers notice that it is gone
    while (left := members(first.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.slow
def test_of_two_preparers_at_once_one_does_the_work_and_the_other_waits_for_it(
    preparer: Any, folder: Path, go: Path
) -> None:
    first = preparer()
    assert says(first) == "filling"
    second = preparer()
    assert says(second) == "waiting"
    go.touch()
    assert says(first) == "made 1000"
    assert says(second) == "from cache 1000"
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_one_who_waits_takes_over_when_the_first_is_killed(preparer: Any, go: Path) -> None:
    first, second = preparer(), None
    assert says(first) == "filling"
    second = preparer()
    assert says(second) == "waiting"
    first.kill()
    assert says(second) == "filling"
    go.touch()
    assert says(second) == "made 1000"


def members(session: int) -> list[str]:
    """Processes of a session that are still at work."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(name)
    return found


def test_a_set_that_is_there_is_read_where_nothing_may_be_written(tmp_path: Path, words: Any, folder: Path) -> None:
    section = data(tmp_path / "a.jsonl")
    made(section, words)
    for lock in folder.glob("*.lock"):
        lock.unlink()
    frozen = tmp_path / "frozen"
    shutil.copytree(folder.parent, frozen)
    (frozen / "prepared").chmod(0o555)
    before = sorted((frozen / "prepared").rglob("*"))
    assert made(section.model_copy(update={"cache_dir": str(frozen)}), words).from_cache
    assert sorted((frozen / "prepared").rglob("*")) == before
    (frozen / "prepared").chmod(0o755)
