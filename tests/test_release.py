"""One version everywhere, a changelog whose upgrade note is what the config knows, and hooks that run what CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from running import REPOSITORY

from shardtune import __version__
from shardtune.config import load_config
from shardtune.config.renamed import RENAMED
from shardtune.config.suggestions import section_fields
from shardtune.errors import UserInputError

CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
# A tag of the image that docs and recipes name, and what they print as the version.
NAMED = re.compile(r"shardtune(?::| )(\d+\.\d+\.\d+)|ARG VERSION=(\S+)")


def test_the_newest_version_of_the_changelog_is_the_packages() -> None:
    versions = re.findall(r"^## \[([^\]]+)\] - (\d{4}-\d\d-\d\d)$", CHANGELOG, flags=re.MULTILINE)
    assert versions[0][0] == __version__
    numbers = [tuple(map(int, version.split("."))) for version, _ in versions]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == len(numbers)
    assert [date for _, date in versions] == sorted((date for _, date in versions), reverse=True)


def test_the_package_takes_its_version_from_the_code() -> None:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shardtune.__version__"}


def test_every_version_that_files_name_is_this_one() -> None:
    files = [*map(REPOSITORY.joinpath, ("README.md", "Containerfile")), *REPOSITORY.glob("configs/*.yaml")]
    named = {
        (file.name, one or other)
        for file in [*files, *REPOSITORY.glob("docs/**/*.md")]
        for one, other in NAMED.findall(file.read_text(encoding="utf-8"))
    }
    assert {"Containerfile", "air-gapped.md"} <= {file for file, _ in named}, "the pattern finds nothing"
    assert {(file, version) for file, version in named if version != __version__} == set()


def test_the_upgrade_note_has_every_setting_that_the_config_knows_to_be_gone() -> None:
    notes = re.findall(r"^### Upgrading\n(.*?)(?=^##)", CHANGELOG, flags=re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| `([\w.]+)` \|", "".join(notes), flags=re.MULTILINE)
    assert sorted(listed) == sorted(RENAMED)


@pytest.mark.parametrize("path", RENAMED)
def test_a_setting_that_is_gone_is_refused_with_what_to_write_instead(path: str, tmp_path: Path) -> None:
    section, key = path.split(".")
    fields = section_fields()
    assert key not in fields[section].model_fields
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{model_name_or_path: m}}\ndata: {{dataset_name_or_path: d}}\n{section}: {{{key}: {{seed: 1}}}}\n"
    )
    with pytest.raises(UserInputError) as refused:
        load_config(file, environ={})
    text = " ".join(str(refused.value).split())
    assert f"`{path}` is gone: " in text
    named = re.findall(r"`([\w.]+)`", text.split(" is gone: ")[1])
    prefixed = [name if "." in name else f"{section}.{name}" for name in named]
    assert prefixed and all(name.split(".")[1] in fields[name.split(".")[0]].model_fields for name in prefixed)


def test_the_hooks_run_the_commands_of_make_lint_and_make_types() -> None:
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repo,) = config["repos"]
    assert repo["repo"] == "local" and {hook["language"] for hook in repo["hooks"]} == {"system"}, (
        "nothing is downloaded"
    )
    assert not any(hook["pass_filenames"] for hook in repo["hooks"]), "as CI does: everything, not what a commit has"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    recipes = "".join(re.findall(r"^(?:lint|types): install\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE))
    assert [hook["entry"] for hook in repo["hooks"]] == recipes.replace("$(BIN)", ".venv/bin").replace(
        "\t", ""
    ).splitlines()
