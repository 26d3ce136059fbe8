"""A file that a user named is replaced whole; what is no plain file is written to, never replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shardtune.durable import write_output


def test_a_plain_file_is_replaced_and_a_link_leads_to_it(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to("file.html")
    for content in ("new", "again"):  # a link that leads nowhere yet, then one to a file
        write_output(link, content)
        assert link.is_symlink() and (tmp_path / "file.html").read_text() == content
    write_output(tmp_path / "file.html", "itself")
    assert link.read_text() == "itself" and sorted(path.name for path in tmp_path.iterdir()) == [
        "file.html",
        "link.html",
    ]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(pipe, "text")
        assert os.read(reader, 100) == b"text" and stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


@pytest.mark.parametrize("name", [".", "..", "", "/"])
def test_a_folder_is_an_error_of_the_disk(name: str) -> None:
    with pytest.raises(IsADirectoryError):
        write_output(Path(name), "text")
