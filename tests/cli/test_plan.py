"""`shardtune plan` as users call it: without torch, from headers alone."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from running import REPOSITORY
from typer.testing import CliRunner

from shardtune.cli.main import app
from shardtune.errors import UserInputError
from shardtune.plan.public_models import CONFIGS, shapes_of

# Whoever needs torch fails: neither it nor what brings it can be imported.
_WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft", "datasets", "accelerate"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from shardtune.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 3.1 8B as far as a plan reads it: config.json, and headers of weights that are a hole in the file."""
    folder = tmp_path_factory.mktemp("llama-8b")
    (folder / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"]), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes_of(CONFIGS["Llama-3.1-8B"]):
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder


@pytest.fixture
def config(tmp_path: Path, llama_8b: Path) -> Path:
    rows = [{"text": f"row {number} " + "and some words " * (number % 40)} for number in range(300)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{model_name_or_path: {llama_8b}}}\n"
        f"data: {{dataset_name_or_path: {tmp_path / 'train.jsonl'}, max_length: 1024}}\n"
        "train: {per_device_train_batch_size: 2, gradient_accumulation_steps: 4}\n",
        encoding="utf-8",
    )
    return file


def plan(config: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["plan", str(config), *options], catch_exceptions=True)


def as_json(config: Path, *options: str) -> dict[str, Any]:
    result = plan(config, "--json", *options)
    assert result.exit_code in (0, 1), result.exception
    return dict(json.loads(result.stdout))


def test_it_needs_no_torch(config: Path) -> None:
    options = ["plan", str(config), "--gpus", "2xH200", "--nodes", "2", "--compare"]
    result = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("fits: ")
    assert "estimated from 300 rows" in result.stdout


def test_the_exit_code_says_whether_it_fits(config: Path) -> None:
    assert plan(config, "--gpus", "1xH200").exit_code == 0
    too_large = ["-o", "train.per_device_train_batch_size=512", "-o", "train.gradient_checkpointing=none"]
    result = plan(config, "--gpus", "1x4090", *too_large)
    assert result.exit_code == 1
    assert result.stdout.startswith("does not fit: ") and "-o train.per_device_train_batch_size=" in result.stdout


def test_what_train_would_refuse_is_refused(config: Path) -> None:
    for options, words in (
        (["--gpus", "2xH999"], "H999"),
        (["--gpus", "2xH100", "-o", "parallel.nproc=4"], "parallel.nproc is 4"),
        (["--gpus", "1xH100", "-o", "lora.target_modules=no_such_module"], "no_such_module"),
        (["--gpus", "1xH100", "-o", "data.text_field=missing"], "missing"),
        (["--gpus", "1xH100", "-o", "data.val_split=test"], "has no split 'test'"),
    ):
        error = plan(config, *options).exception
        assert isinstance(error, UserInputError) and error.exit_code == 2 and words in error.what, error


def test_more_nodes_are_more_processes_with_the_same_work_each(config: Path) -> None:
    one, four = as_json(config, "--gpus", "8xH100"), as_json(config, "--gpus", "8xH100", "--nodes", "4")
    assert one["machine"]["nodes"] == [8] and four["machine"]["nodes"] == [8] * 4
    assert four["training"]["effective_batch"] == 4 * one["training"]["effective_batch"]
    assert four["model"]["parameters"] == 8_030_261_248


def test_the_cluster_that_the_config_names_is_planned_for(config: Path) -> None:
    named = ["-o", "cluster.gpu=H100", "-o", "cluster.gpus_per_node=8", "-o", "cluster.nodes=4"]
    assert as_json(config, *named) == as_json(config, "--gpus", "8xH100", "--nodes", "4")
    assert as_json(config, *named, "--gpus", "2xH200")["machine"]["nodes"] == [2] * 4


def test_alternatives_are_in_the_json_too(config: Path) -> None:
    found = as_json(config, "--gpus", "1xH100", "--compare")
    assert found["fits"] and found["nearest"] is None
    assert any(not one["changes"] for one in found["alternatives"])
    speeds = [one["tokens_per_second"] for one in found["alternatives"] if one["fits"]]
    assert speeds == sorted(speeds, reverse=True)


def test_on_this_machine_without_a_gpu_it_is_a_coarse_plan_for_the_cpu(config: Path) -> None:
    result = plan(config, "-o", "parallel.device=cpu", "-o", "train.max_steps=3")
    assert "CPU process" in result.stdout and "coarse" in result.stdout


def test_every_field_of_the_json_is_documented(config: Path) -> None:
    text = (REPOSITORY / "docs" / "plan.md").read_text(encoding="utf-8")
    found = as_json(config, "--gpus", "2xH100", "--compare")
    for name, value in found.items():
        assert f"`{name}`" in text, name
        inner = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict):
            assert all(f"`{key}`" in text for key in inner), (name, [key for key in inner if f"`{key}`" not in text])
