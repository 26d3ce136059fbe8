"""Pages that point at each other and at code: links lead somewhere, and docs/from-trl.md leaves out no line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from running import REPOSITORY

from shardtune.config.accelerate_file import translate_file
from shardtune.config.suggestions import section_fields

PAGES = sorted(
    [
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        REPOSITORY / "CHANGELOG.md",
        *(REPOSITORY / "docs").glob("*.md"),
    ]
)
FROM_TRL = REPOSITORY / "docs" / "from-trl.md"


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_or_a_heading_leads_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def files_of_the_page() -> dict[str, str]:
    """Code blocks under a bold file name, by that name."""
    text = FROM_TRL.read_text(encoding="utf-8")
    return dict(re.findall(r"^\*\*`([\w.]+)`\*\*\n\n```\w+\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))


def named_in_tables() -> dict[str, list[str]]:
    """The cells of each row whose first cell names something, by that name."""
    rows = [line.split(" | ") for line in FROM_TRL.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {name: row for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_argument_of_the_script_has_a_fate() -> None:
    fates = " ".join(named_in_tables())
    calls = [node for node in ast.walk(ast.parse(files_of_the_page()["train.py"])) if isinstance(node, ast.Call)]
    given = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    assert len(given) > 35
    missing = {name for name in given - {"model", "args"} if not re.search(rf"\b{name}\b", fates)}
    assert not missing


def test_every_key_of_the_file_has_the_verdict_the_page_gives_it(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(files_of_the_page()["fsdp.yaml"])
    translation = translate_file(tmp_path / "fsdp.yaml")
    assert translation.problems == ()
    fates = named_in_tables()
    for verdict in translation.verdicts:
        assert fates[verdict.key][1] == verdict.verdict, verdict.key
        if verdict.sets:
            assert f"`{verdict.sets.partition(' = ')[0]}`" in fates[verdict.key][2], verdict.key


def test_every_variable_and_option_of_the_launcher_has_a_fate() -> None:
    script = files_of_the_page()["launch.sh"]
    used = {*re.findall(r"export (\w+)", script), *re.findall(r" (--\w+)", script)}
    assert len(used) == 11 and used <= set(named_in_tables())


def test_every_setting_the_page_names_is_one() -> None:
    sections = section_fields()
    text = FROM_TRL.read_text(encoding="utf-8")
    named = [found for found in re.findall(rf"`({'|'.join(sections)})\.(\w+)`", text) if found != ("train", "py")]
    assert len(named) > 25
    assert [f"{section}.{key}" for section, key in named if key not in sections[section].model_fields] == []


def test_the_config_says_what_the_script_says() -> None:
    """The same numbers on both sides, wherever a name is the same."""
    calls = ast.walk(ast.parse(files_of_the_page()["train.py"]))
    given = {
        keyword.arg: keyword.value.value if isinstance(keyword.value, ast.Constant) else ast.unparse(keyword.value)
        for call in calls if isinstance(call, ast.Call) for keyword in call.keywords
    }  # fmt: skip
    config = yaml.safe_load(files_of_the_page()["run.yaml"])
    settings = {key: value for section in ("lora", "data", "train") for key, value in config[section].items()}
    same = {key for key in settings if key in given}
    assert len(same) > 15
    for key in same - {"target_modules", "learning_rate"}:
        assert settings[key] == given[key], key
    assert settings["target_modules"] == ast.literal_eval(given["target_modules"])
    assert float(settings["learning_rate"]) == given["learning_rate"]
