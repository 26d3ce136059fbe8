"""Does the reader say what the YAML says, and where?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small_configs import SMALLEST, Load, Report

from shardtune.config import ConfigError, load_config
from shardtune.config.yaml_reader import read_yaml, typed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("5E-5", 5e-5), ("1.e3", 1000.0), (".5", 0.5), ("-3", -3), ("0x1F", 31), ("0o17", 15),
        ("true", True), ("False", False), ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"),
        ("null", None), ("~", None), ("", None), ("2024-01-01", "2024-01-01"), ("1:30", "1:30"), ("e5", "e5"),
        (".inf", math.inf), ("1_000", "1_000"), ("9" * 5000, math.inf),
    ],
)  # fmt: skip
def test_an_unquoted_scalar_is_typed_as_in_yaml_1_2(text: str, value: object) -> None:
    assert typed(text) == value
    assert type(typed(text)) is type(value)


def test_every_key_and_value_keeps_its_line_and_column() -> None:
    top, problems = read_yaml("train:\n  seed: 7\n  list: [a, b]\n", "run.yaml", {})
    assert top is not None and not problems
    seed = top.value["train"].value["seed"]
    assert (str(seed.key_place), str(seed.place)) == ("run.yaml:2:3", "run.yaml:2:9")
    assert str(top.value["train"].value["list"].value[1].place) == "run.yaml:3:13"


def test_a_quoted_number_stays_text_and_a_tagged_one_too() -> None:
    top, _ = read_yaml("a: '1e-4'\nb: !!str 5\nc: \"true\"\nd: |\n  no\n", "x", {})
    assert top is not None
    assert top.plain() == {"a": "1e-4", "b": "5", "c": "true", "d": "no\n"}


def test_anchors_aliases_and_merge_keys_work_and_own_keys_win() -> None:
    text = "base: &base {x: 1, y: 2}\nother: &other {y: 8, z: 9}\nuse:\n  <<: [*base, *other]\n  x: 5\nsame: *base\n"
    top, problems = read_yaml(text, "x", {})
    assert top is not None and not problems
    assert top.plain()["use"] == {"x": 5, "y": 2, "z": 9}
    assert top.plain()["same"] == {"x": 1, "y": 2}


def test_a_merge_key_in_a_config_gives_its_values_and_their_places(load: Load) -> None:
    text = "lora:\n  alpha_pattern: &a {q_proj: 1}\n  rank_pattern: {<<: *a, k_proj: 2}\n"
    resolved = load(SMALLEST + text)
    assert resolved.config.lora.rank_pattern == {"q_proj": 1, "k_proj": 2}
    assert resolved.origins["lora.rank_pattern.q_proj"].where == "run.yaml:4:22"


def test_a_duplicate_key_is_a_problem_that_names_the_first_place(report: Report) -> None:
    said = report(SMALLEST + "train:\n  seed: 1\n  seed: 2\n")
    assert "run.yaml:5:3 train.seed this key is already set at run.yaml:4:3" in said


def test_an_alias_that_contains_itself_is_refused(report: Report) -> None:
    assert "run.yaml:3:16 cluster.env.x this alias contains itself" in report(SMALLEST + "cluster: {env: &a {x: *a}}\n")


def test_aliases_that_explode_are_refused_instead_of_filling_the_memory(report: Report) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "aliases expand to more than 100000 values" in report("\n".join(lines))


def test_brackets_nested_thousands_deep_are_refused(report: Report) -> None:
    assert "nested too deep" in report("a: " + "[" * 5000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml:1:1 the file is empty"),
        ("# only a comment\n", "run.yaml:1:1 the file is empty"),
        ("- a\n- b\n", "run.yaml:1:1 the file is a list, not sections"),
        ("hello\n", "run.yaml:1:1 the file is a single value, not sections"),
        (SMALLEST + "train:\n\tseed: 1\n", "run.yaml:4:1 a tab; YAML indents with spaces"),
        (SMALLEST + "train:\n  seed:\t1\n", "run.yaml:4:8 a tab; YAML indents with spaces"),
        ("a: b\n\tc: d\n", "run.yaml:2:1 a tab; YAML indents with spaces"),
        ("train:\n  seed: 1\n   r: 2\n", "run.yaml:3:5 not valid YAML: mapping values are not allowed here"),
        ("train: [1, 2\n", "close the bracket"),
        ("a: [${X}]\n", 'inside [ ] and { } put quotes around "${VAR}"'),
        ("a: *x\n", "run.yaml:1:4 not valid YAML: found undefined alias 'x'; a string that starts with * needs quotes"),
        ("a: @x\n", "run.yaml:1:4 not valid YAML: found character '@'"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2:1 a second document starts here"),
        ("a: \x01\n", "run.yaml:1:4 a character that YAML does not allow (code 1)"),
        ("? [a]\n: 3\n", "run.yaml:1:3 a key must be a string"),
        (SMALLEST + "train: {seed: !!python/name:os 3}\n", "train.seed the YAML tag !!python/name:os is not supported"),
        (SMALLEST + "train: {<<: 3}\n", "run.yaml:3:13 train `<<` merges a mapping"),
    ],
)  # fmt: skip
def test_broken_yaml_is_answered_with_the_place_and_plain_words(report: Report, text: str, expected: str) -> None:
    assert expected in report(text)


def test_bytes_that_are_not_utf_8_are_located(folder: Path) -> None:
    (folder / "run.yaml").write_bytes(b"model:\n  revision: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2:16\n    not UTF-8 text \(byte 0xe9\); save the file as UTF-8"):
        load_config(Path("run.yaml"))


def test_a_byte_order_mark_and_windows_line_ends_are_harmless(folder: Path) -> None:
    (folder / "run.yaml").write_bytes(b"\xef\xbb\xbf" + SMALLEST.replace("\n", "\r\n").encode())
    assert load_config(Path("run.yaml"), environ={}).config.model.model_name_or_path == "gpt2"


def test_a_missing_file_is_named_with_its_neighbours(folder: Path) -> None:
    (folder / "other.yaml").write_text(SMALLEST)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("run.yaml"))
    assert "there is no file 'run.yaml'; '.' has other.yaml" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_folder_is_said_to_be_missing(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder 'nowhere' does not exist\s+either"):
        load_config(Path("nowhere/run.yaml"))


def test_a_folder_in_place_of_a_file_is_said_to_be_one(folder: Path) -> None:
    (folder / "configs").mkdir()
    with pytest.raises(ConfigError, match="'configs' is a folder, not a file"):
        load_config(Path("configs"))


def test_an_unreadable_file_is_answered_with_the_system_s_reason(folder: Path) -> None:
    (folder / "run.yaml").symlink_to("run.yaml")
    with pytest.raises(ConfigError, match=r"'run\.yaml' cannot be read: Too many levels of symbolic links"):
        load_config(Path("run.yaml"))
