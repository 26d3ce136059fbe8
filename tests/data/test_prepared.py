from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import Command
from toys import toy_config

from shardtune.data.packing import pack
from shardtune.data.prepared import MANIFEST, EncodedRows, Prepared, PreparedCounts, PreparedWriter
from shardtune.data.tokens import IGNORED
from shardtune.errors import UserInputError

ROWS = [([5, 6, 7], [0, 1, 1]), ([8, 9], [1, 1]), ([5, 6, 7], [0, 0, 1]), ([70000, 2, 3, 4], [1, 1, 0, 0])]


def encoded(rows: list[tuple[list[int], list[int]]]) -> EncodedRows:
    return EncodedRows(
        ids=np.array([i for ids, _ in rows for i in ids], np.int32),
        supervised=np.array([m for _, mask in rows for m in mask], np.uint8),
        lengths=np.array([len(ids) for ids, _ in rows], np.int64),
        learnt=np.array([sum(mask[1:]) for _, mask in rows], np.int32),
        hashes=np.array([hash(tuple(ids)) & 0xFFFF for ids, _ in rows], np.uint64),
        has_end=np.array([2 in ids for ids, _ in rows]),
    )


def written(folder: Path, taken: list[int] | None = None, rows: Any = None) -> Path:
    writer = PreparedWriter(folder)
    rows = rows or ROWS
    writer.add(encoded(rows[:1]))
    writer.add(encoded(rows[1:]))
    writer.close({"read": 9, "cut": 1, "errors": ("a:1: x",)}, np.array(taken) if taken else None, {"note": "hello"})
    return folder


def damaged(folder: Path) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        Prepared.open(folder)
    return caught.value


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))
    assert len(prepared) == 4
    for number, (ids, mask) in enumerate(ROWS):
        got, labels = prepared.row(number)
        assert got.dtype == labels.dtype == np.int32
        assert got.tolist() == ids
        assert labels.tolist() == [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]
    assert prepared.lengths.tolist() == [3, 2, 3, 4]
    assert prepared.supervised.tolist() == [2, 1, 1, 1]
    assert prepared.manifest["note"] == "hello"


def test_what_became_of_the_rows_is_counted(tmp_path: Path) -> None:
    assert Prepared.open(written(tmp_path / "p")).counts == PreparedCounts(
        read=9,
        rows=4,
        tokens=12,
        supervised=5,
        cut=1,
        duplicates=1,
        largest_id=70000,
        without_eos=3,
        errors=("a:1: x",),
    )


def test_rows_that_are_taken_twice_or_not_at_all_are_stored_once(tmp_path: Path) -> None:
    prepared = Prepared.open(written(tmp_path / "p", taken=[1, 1, 3]))
    assert [prepared.row(n)[0].tolist() for n in range(3)] == [[8, 9], [8, 9], [70000, 2, 3, 4]]
    assert prepared.lengths.tolist() == [2, 2, 4]
    assert prepared.supervised.tolist() == [1, 1, 1]
    assert (prepared.counts.rows, prepared.counts.tokens, prepared.counts.supervised) == (3, 8, 3)
    assert prepared.counts.without_eos == 2
    assert prepared.counts.duplicates == 1  # of what is stored: a weight is no mistake
    assert (tmp_path / "p" / "tokens.bin").stat().st_size == 4 * 12


def test_a_row_can_be_changed_by_who_reads_it_without_harm(tmp_path: Path) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))
    ids, labels = prepared.row(0)
    ids[0] = labels[0] = 1
    assert prepared.row(0)[0][0] == 5


def test_a_number_beyond_the_rows_is_an_error(tmp_path: Path) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))
    for number in (-1, 4):
        with pytest.raises(IndexError):
            prepared.row(number)


def test_it_travels_to_another_process_as_its_folder_not_its_tokens(tmp_path: Path) -> None:
    prepared = Prepared.open(written(tmp_path / "p", rows=[(list(range(100_000)), [1] * 100_000), ([1, 2], [1, 1])]))
    sent = pickle.dumps(prepared)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).row(0)[0], prepared.row(0)[0])


@pytest.mark.parametrize("name", ["tokens.bin", "supervised.bin", "offsets.bin", "learnt.bin", "taken.bin"])
def test_a_file_that_lacks_bytes_is_noticed(tmp_path: Path, name: str) -> None:
    file = written(tmp_path / "p", taken=[0, 1]) / name
    file.write_bytes(file.read_bytes()[:-1])
    problem = damaged(tmp_path / "p")
    assert "not a complete prepared dataset" in problem.what
    assert name in problem.why
    assert "prepare" in problem.fix


def test_a_file_with_other_bytes_is_noticed(tmp_path: Path) -> None:
    file = written(tmp_path / "p") / "offsets.bin"
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    assert "the checksum of offsets.bin does not match" in damaged(tmp_path / "p").why


def test_a_folder_without_a_manifest_is_not_read(tmp_path: Path) -> None:
    (written(tmp_path / "p") / MANIFEST).unlink()
    assert "not a complete prepared dataset" in damaged(tmp_path / "p").what
    (tmp_path / "p" / MANIFEST).write_text("[]")
    assert "not a complete prepared dataset" in damaged(tmp_path / "p").what


def test_a_folder_of_another_version_says_so(tmp_path: Path) -> None:
    file = written(tmp_path / "p") / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 99}))
    problem = damaged(tmp_path / "p")
    assert "another version" in problem.what
    assert "99" in problem.why


def test_packs_are_those_of_the_rows_and_kept_for_the_next_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared.open(written(tmp_path / "p", taken=[0, 3, 1, 1, 2]))
    first = prepared.packs(5)
    wanted = pack(prepared.lengths, 5)
    assert np.array_equal(first.rows, wanted.rows)
    assert np.array_equal(first.offsets, wanted.offsets)
    assert (tmp_path / "p" / "packs.5.bin").stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr("shardtune.data.prepared.pack", None)  # must not be needed again
    again = Prepared.open(tmp_path / "p").packs(5)
    assert np.array_equal(again.rows, wanted.rows)
    assert np.array_equal(again.offsets, wanted.offsets)


@pytest.mark.parametrize("left", [b"", b"12345678", b"1234"])
def test_packs_that_were_cut_short_are_made_again(tmp_path: Path, left: bytes) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))
    wanted = prepared.packs(8)
    (tmp_path / "p" / "packs.8.bin").write_bytes(left)
    assert np.array_equal(prepared.packs(8).rows, wanted.rows)


def test_a_flipped_bit_anywhere_in_packs_is_noticed_and_they_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))
    wanted, file = prepared.packs(8), tmp_path / "p" / "packs.8.bin"
    sound = file.read_bytes()
    for place in range(len(sound)):
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        caplog.clear()
        again = prepared.packs(8)
        assert np.array_equal(again.rows, wanted.rows) and np.array_equal(again.offsets, wanted.offsets), place
        assert "packs.8.bin is damaged" in caplog.text and file.read_bytes() == sound, place


def test_packs_of_other_rows_or_another_length_are_not_taken(tmp_path: Path) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))
    wanted = prepared.packs(9)
    other = Prepared.open(written(tmp_path / "other", taken=[3, 2, 1, 0]))
    assert len(other) == len(prepared)
    other.packs(9)
    prepared.packs(8)
    for source in (other.folder / "packs.9.bin", prepared.folder / "packs.8.bin"):
        (prepared.folder / "packs.9.bin").write_bytes(source.read_bytes())
        again = prepared.packs(9)
        assert np.array_equal(again.rows, wanted.rows) and np.array_equal(again.offsets, wanted.offsets)


@pytest.mark.slow
def test_a_command_that_finds_damaged_packs_says_so_and_mends_them(
    shardtune: Command, toy_model: Path, toy_data: Path, tmp_path: Path
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data, data={"cache_dir": str(tmp_path / "cache")})
    first = shardtune("data", "inspect", config)
    assert first.returncode == 0, first.stderr
    (file,) = tmp_path.glob("cache/**/packs.64.bin")
    sound = file.read_bytes()
    file.write_bytes(sound[:-40] + bytes([sound[-40] ^ 1]) + sound[-39:])  # the last row's number: another row twice
    again = shardtune("data", "inspect", config)
    assert (again.returncode, "is damaged" in again.stderr, file.read_bytes() == sound) == (0, True, True), again.stderr


def test_packs_for_a_capacity_below_a_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="does not fit"):
        Prepared.open(written(tmp_path / "p")).packs(3)


def test_a_set_on_a_disk_that_may_only_be_read_can_still_be_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError("read-only")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert len(prepared.packs(8)) == 2
    assert not list((tmp_path / "p").glob("packs*"))


def test_many_who_ask_for_packs_at_once_all_get_them(tmp_path: Path) -> None:
    prepared = Prepared.open(written(tmp_path / "p"))
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(len(prepared.packs(8)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [2] * 8
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == sorted(
        ["tokens.bin", "supervised.bin", "offsets.bin", "learnt.bin", MANIFEST, "packs.8.bin"]
    )
