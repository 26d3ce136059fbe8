"""Do files that extend others merge as they should, and is every value's file known?"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_configs import SMALLEST

from shardtune.config import ConfigError, Origin, load_config


def _load(path: str = "run.yaml") -> object:
    return load_config(Path(path), environ={})


def test_the_file_wins_over_what_it_extends_and_later_files_over_earlier(folder: Path) -> None:
    (folder / "a.yaml").write_text(SMALLEST + "lora: {r: 1, lora_alpha: 1, target_modules: [x, y]}\ntrain: {seed: 1}\n")
    (folder / "b.yaml").write_text("lora: {r: 2, lora_alpha: 2}\n")
    (folder / "run.yaml").write_text("extends: [a.yaml, b.yaml]\nlora:\n  r: 3\n  target_modules: [z]\n")
    resolved = load_config(Path("run.yaml"), environ={})
    lora = resolved.config.lora
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (3, 2, ["z"])
    assert resolved.origins["lora.r"] == Origin("file", "run.yaml:3:3")
    assert resolved.origins["lora.lora_alpha"] == Origin("file", "b.yaml:1:14")
    assert resolved.origins["train.seed"] == Origin("file", "a.yaml:4:9")


def test_a_path_is_relative_to_the_file_that_says_it(folder: Path) -> None:
    (folder / "bases").mkdir()
    (folder / "bases" / "deep.yaml").write_text(SMALLEST)
    (folder / "bases" / "mid.yaml").write_text("extends: deep.yaml\ntrain: {seed: 4}\n")
    (folder / "run.yaml").write_text("extends: bases/mid.yaml\n")
    resolved = load_config(Path("run.yaml"), environ={})
    assert resolved.config.train.seed == 4
    assert resolved.origins["model.model_name_or_path"].where == "bases/deep.yaml:1:9"


def test_a_circle_of_files_is_a_problem_at_the_line_that_closes_it(folder: Path) -> None:
    (folder / "run.yaml").write_text("extends: b.yaml\n")
    (folder / "b.yaml").write_text("train: {}\nextends: run.yaml\n")
    with pytest.raises(
        ConfigError,
        match=r"b\.yaml:2:10  extends\n    these files extend each other in a circle: run\.yaml → b\.yaml →",
    ):
        _load()


def test_two_files_may_extend_the_same_third(folder: Path) -> None:
    (folder / "base.yaml").write_text(SMALLEST)
    (folder / "a.yaml").write_text("extends: base.yaml\ntrain: {seed: 1}\n")
    (folder / "b.yaml").write_text("extends: base.yaml\nlora: {r: 2}\n")
    (folder / "run.yaml").write_text("extends: [a.yaml, b.yaml]\n")
    config = load_config(Path("run.yaml"), environ={}).config
    assert (config.train.seed, config.lora.r) == (1, 2)


def test_a_missing_base_is_a_problem_at_the_line_that_names_it(folder: Path) -> None:
    (folder / "run.yaml").write_text(SMALLEST + "extends: bse.yaml\n")
    with pytest.raises(
        ConfigError, match=r"run\.yaml:3:10  extends\n    there is no file 'bse\.yaml'; '\.' has run\.yaml"
    ):
        _load()


def test_a_broken_base_is_reported_in_its_own_file_and_nothing_is_said_to_be_missing(folder: Path) -> None:
    (folder / "base.yaml").write_text("model:\n\tx: 1\n")
    (folder / "run.yaml").write_text("extends: base.yaml\ntrain: {seed: 1}\n")
    with pytest.raises(ConfigError) as caught:
        _load()
    assert [str(problem.place) for problem in caught.value.problems] == ["base.yaml:2:1"]


def test_a_mistake_in_a_base_is_reported_at_its_place_there(folder: Path) -> None:
    (folder / "base.yaml").write_text(SMALLEST + "lora: {rr: 3}\n")
    (folder / "run.yaml").write_text("extends: base.yaml\ntrain: {sed: 1}\n")
    with pytest.raises(ConfigError) as caught:
        _load()
    assert [str(problem.place) for problem in caught.value.problems] == ["base.yaml:3:8", "run.yaml:2:9"]


@pytest.mark.parametrize(("value", "column"), [("3", 10), ("[3]", 11), ("{a: b}", 10), ("", 9)])
def test_extends_must_name_files(folder: Path, value: str, column: int) -> None:
    (folder / "run.yaml").write_text(SMALLEST + f"extends: {value}\n")
    with pytest.raises(
        ConfigError, match=rf"run\.yaml:3:{column}  extends\n    expected a file name, or a list of file names"
    ):
        _load()


def test_the_name_of_a_base_may_come_from_the_environment(folder: Path) -> None:
    (folder / "base.yaml").write_text(SMALLEST)
    (folder / "run.yaml").write_text("extends: ${WHICH}.yaml\n")
    assert load_config(Path("run.yaml"), environ={"WHICH": "base"}).config.model.model_name_or_path == "gpt2"
    with pytest.raises(ConfigError, match="the environment variable WHICH is not set"):
        load_config(Path("run.yaml"), environ={})


@pytest.mark.parametrize("sample", ["fsdp1_blog.yaml", "fsdp2.yaml", "three_machines.yaml"])
def test_an_accelerate_file_given_as_the_config_is_told_where_it_belongs(folder: Path, sample: str) -> None:
    (folder / "fsdp.yaml").write_text((Path(__file__).parent / "accelerate_samples" / sample).read_text())
    with pytest.raises(ConfigError, match=r"this is an accelerate config; pass it with `--accelerate-config") as caught:
        _load("fsdp.yaml")
    assert len(caught.value.problems) == 1


def test_a_script_given_as_the_config_is_told_to_be_one(folder: Path) -> None:
    (folder / "train.py").write_text("from trl import SFTTrainer\nmodel: str = 'm'\n")
    with pytest.raises(ConfigError, match="this is a Python script") as caught:
        _load("train.py")
    assert len(caught.value.problems) == 1
