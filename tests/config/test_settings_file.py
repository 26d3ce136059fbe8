"""A config can name anything on the machine: what is not a settings file is refused unread, and never repeated."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Command
from small_configs import SMALLEST

from shardtune.config import ConfigError, load_config
from shardtune.config.settings_file import MOST_BYTES, UnsuitableFileError, read_settings_file

PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj\nAgEAAoIBAQC7VJTUt9Us8cKj\n-----END PRIVATE KEY-----\n"
PASSWD = "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
SHADOW = "root:$6$kbTvNq5D$wZ0rF3:19000:0:99999:7:::\n*:locked:1\n"
OTHERS = [PEM, PASSWD, SHADOW, "password: hunter2\nhost: {user: admin}\n", "- hunter2\n", "a: 'hunter2\n", "x: *hunter2\n",
          "@hunter2\n", "a: &hunter2 1\nb: &hunter2 2\n", "k: !hunter2 v\n", "\thunter2: 1\n", "hunter2: 1\nhunter2: 2\n"]  # fmt: skip


def answer(name: str, *, key: str = "extends") -> str:
    said = f"extends: {name}\n" if key == "extends" else f"parallel: {{accelerate_config: '{name}'}}\n"
    Path("run.yaml").write_text(SMALLEST + said)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("run.yaml"), environ={})
    return " ".join(str(caught.value).split())


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2 * 2**30)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("key", ["extends", "accelerate_config"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (os.mkfifo, "is a pipe, not a file"),
        (_socket, "is a socket, not a file"),
        (Path.mkdir, "is a folder, not a file"),
        (_sparse, "is too large for a settings file (2,147,483,648 bytes"),
        (lambda path: path.symlink_to("gone"), "no file"),
    ],
    ids=["device", "pipe", "socket", "folder", "2 GB", "dangling link"],
)
def test_what_is_no_settings_file_is_refused_before_it_is_read(
    folder: Path, make: Callable[[Path], None], says: str, key: str
) -> None:
    make(folder / "odd.yaml")
    text = answer("odd.yaml", key=key)
    assert says in text or (says == "no file" and "does not exist" in text), text


def test_the_config_itself_may_be_no_device_either(shardtune: Command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it
    for name, kind in (("/dev/zero", "device"), (tmp_path / "pipe", "pipe"), (tmp_path, "folder")):
        done = shardtune("config", "validate", name)
        assert (done.returncode, f"is a {kind}, not a file" in " ".join(done.stderr.split())) == (2, True), done.stderr


def test_a_file_without_a_size_is_read_no_further_than_a_config_goes(folder: Path) -> None:
    endless = Path("/proc/self/pagemap")  # regular, of size 0, with as many bytes as one cares to read
    if not endless.is_file():
        pytest.skip("no /proc here")
    with pytest.raises(UnsuitableFileError, match=f"more than {MOST_BYTES:,} bytes"):
        read_settings_file(endless)


def test_links_to_configs_are_followed(folder: Path) -> None:
    (folder / "..data").mkdir()  # as Kubernetes mounts a ConfigMap
    (folder / "..data" / "base.yaml").write_text(SMALLEST)
    (folder / "base.yaml").symlink_to("..data/base.yaml")
    (folder / "run.yaml").write_text("extends: base.yaml\n")
    assert load_config(Path("run.yaml"), environ={}).config.model.model_name_or_path == "gpt2"


def test_an_open_file_can_be_named_by_its_descriptor_and_a_pipe_cannot(folder: Path) -> None:
    (folder / "base.yaml").write_text(SMALLEST)
    with (folder / "base.yaml").open("rb") as stream:
        assert read_settings_file(Path(f"/dev/fd/{stream.fileno()}")) == SMALLEST.encode()
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as silent:
        assert silent.stdout is not None
        with pytest.raises(UnsuitableFileError, match="is a pipe"):
            read_settings_file(Path(f"/dev/fd/{silent.stdout.fileno()}"))
        silent.kill()


@pytest.mark.parametrize("key", ["extends", "accelerate_config"])
@pytest.mark.parametrize("content", OTHERS)
def test_nothing_of_a_foreign_file_is_repeated(folder: Path, content: str, key: str) -> None:
    (folder / "other").write_text(content)
    text = answer("other", key=key)
    assert "other" in text
    for word in ("hunter2", "MIIE", "AgEA", "PRIVATE", "/bin/bash", "daemon", "$6$", "locked", "admin", "password"):
        assert word not in text, text


def test_a_binary_file_is_refused_with_one_byte_of_it(folder: Path) -> None:
    (folder / "other").write_bytes(b"\x89PNG\r\n\x1a\nhunter2")
    assert "other:1:1 not UTF-8 text (byte 0x89)" in answer("other")
    assert "hunter2" not in answer("other", key="accelerate_config")


def test_mistakes_in_a_base_that_is_a_config_are_still_quoted(folder: Path) -> None:
    (folder / "base.yaml").write_text("lora: {r: eight}\n")
    assert "base.yaml:1:11 lora.r expected a whole number, at least 1; got 'eight'" in answer("base.yaml")


def test_names_that_no_file_can_have_are_refused(folder: Path) -> None:
    assert "null character" in answer('"a\\0b"')
    assert "File name too long" in answer("x" * 300)
    assert "there is no file '~nobody-of-this-name/base.yaml'" in answer("~nobody-of-this-name/base.yaml")
    assert "does not exist" in answer("~nobody-of-this-name/base.yaml", key="accelerate_config")
    (folder / "loop").symlink_to("loop")
    assert "'loop' cannot be read: Too many levels of symbolic links" in answer("loop")


def test_files_that_extend_without_end_are_counted(folder: Path) -> None:
    for number in range(30):
        (folder / f"{number}.yaml").write_text(f"extends: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (folder / "30.yaml").write_text(SMALLEST)
    assert "more than 100 files are read through `extends`" in answer("0.yaml")
