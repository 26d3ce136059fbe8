"""Does `shardtune config` answer as a user expects, with exit codes and without a traceback?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from small_configs import SMALLEST
from unprivileged import PREFIX, needs_permissions

import shardtune

ROOT = Path(shardtune.__file__).parents[1]


@pytest.fixture(autouse=True)
def _files(folder: Path) -> None:
    (folder / "run.yaml").write_text(SMALLEST)
    (folder / "rows.jsonl").write_text('{"text": "a row"}\n')
    (folder / "bad.yaml").write_text(SMALLEST + "train:\n  learnng_rate: 1\n  seed: -1\n")


def shardtune_config(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, "-m", "shardtune", "config", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
    )


def test_validate_says_ok_and_what_the_config_is_about() -> None:
    done = shardtune_config("validate", "run.yaml", "-o", "lora.r=4", "--override", "model.device_map=auto")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ok: run.yaml: gpt2, LoRA r=4, on rows.jsonl, 3 epochs, learning rate 0.0001",
        "notice: model.device_map (auto) has no effect: FSDP2 places the weights.",
        "not checked: whether gpt2 can be downloaded; the rows, columns and splits of the data (`shardtune data "
        "inspect`); lora.target_modules in the model; whether it fits in memory",
    ]


def test_validate_finds_every_path_that_is_not_there_at_the_line_that_names_it(folder: Path) -> None:
    (folder / "paths.yaml").write_text(
        "model: {model_name_or_path: ./model}\n"
        "data: {dataset_name_or_path: none.jsonl, chat_template: my.jinja}\n"
        "train: {output_dir: rows.jsonl/runs, resume: runs/one}\n"
    )
    done = shardtune_config("validate", "paths.yaml", "-o", "model.tokenizer_name_or_path=./words")
    assert (done.returncode, done.stdout) == (2, "")
    said = " ".join(done.stderr.split())
    for place, problem in (
        ("paths.yaml:1:9 model.model_name_or_path", "The model folder './model' does not exist."),
        ("paths.yaml:2:8 data.dataset_name_or_path", "The dataset 'none.jsonl' does not exist."),
        ("paths.yaml:2:42 data.chat_template", "The chat template 'my.jinja' does not exist."),
        ("paths.yaml:3:9 train.output_dir", f"'{folder}/rows.jsonl' is a file, not a folder."),
        ("paths.yaml:3:38 train.resume", "The checkpoint 'runs/one' does not exist."),
        ("-o model.tokenizer_name_or_path=./words", "The tokenizer's folder './words' does not exist."),
    ):
        assert place in said and problem in said
    elsewhere = shardtune_config("validate", "paths.yaml", "--no-paths")
    assert elsewhere.returncode == 0 and "not checked: any path; the rows" in elsewhere.stdout


def test_validate_asks_no_hub(folder: Path) -> None:
    (folder / "hub.yaml").write_text("model: {model_name_or_path: org/model}\ndata: {dataset_name_or_path: org/rows}\n")
    done = shardtune_config("validate", "hub.yaml")
    assert done.returncode == 0 and "not checked: whether org/model, org/rows can be downloaded" in done.stdout


@needs_permissions
def test_validate_finds_what_may_not_be_read_or_written(folder: Path) -> None:
    (folder / "rows.jsonl").chmod(0o000)
    (folder / "closed").mkdir(mode=0o555)
    command = [*PREFIX, sys.executable, "-m", "shardtune", "config", "validate", "run.yaml"]
    command += ["-o", "train.output_dir=closed/runs"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert f"'{folder}/closed' is not writable (as user {os.geteuid()})" in said
    assert f"'rows.jsonl' may not be read (as user {os.geteuid()})" in said


def test_validate_lists_the_problems_and_leaves_with_2() -> None:
    done = shardtune_config("validate", "bad.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.yaml:4:3  train.learnng_rate\n    unknown key; did you mean `learning_rate`?" in done.stderr
    assert "bad.yaml:5:9  train.seed" in done.stderr
    assert "Traceback" not in done.stderr


def test_validate_shows_what_became_of_each_key_of_an_accelerate_file(folder: Path) -> None:
    (folder / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    )
    done = shardtune_config("validate", "run.yaml", "--accelerate-config", "fsdp.yaml")
    assert done.returncode == 0
    assert "fsdp_offload_params" in done.stdout
    assert "parallel.offload_params = true" in done.stdout


def test_show_prints_yaml_with_origins_that_validates_again(folder: Path) -> None:
    done = shardtune_config("show", "run.yaml", "-o", "train.seed=5")
    assert "  seed: 5                                     # override: -o train.seed=5" in done.stdout.splitlines()
    (folder / "again.yaml").write_text(done.stdout)
    assert shardtune_config("validate", "again.yaml").returncode == 0


def test_show_as_json_has_values_origins_and_notices() -> None:
    shown = json.loads(shardtune_config("show", "run.yaml", "--json", "-o", "model.use_cache=true").stdout)
    assert shown["config"]["model"]["use_cache"] is True
    assert shown["origins"]["model.use_cache"] == {"source": "override", "where": "-o model.use_cache=true"}
    assert shown["origins"]["train.seed"] == {"source": "default", "where": ""}
    assert "model.use_cache has no effect" in shown["notices"][0]


def test_show_of_a_wrong_config_leaves_with_2() -> None:
    done = shardtune_config("show", "bad.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean `learning_rate`?" in done.stderr


def test_schema_prints_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(shardtune_config("schema").stdout))


def test_reference_prints_the_page_in_docs() -> None:
    assert shardtune_config("reference").stdout == (ROOT / "docs" / "config-reference.md").read_text(encoding="utf-8")
