"""A run's files tell how its settings were written, not what the environment held; and it is found by what it held."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Command, events
from toys import toy_config, toy_rows

VALUES = {"ROWS": "rows-735197351", "WORD": "word735197351", "TARGET": "v_proj", "R": "3", "SEED": "735197351", "BASE": "base735197351",
          "CACHE": "cache735197351", "HUB": "hub735197351", "HOST": "https://host735197351/x"}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("references")
    rows, base = folder / VALUES["ROWS"], folder / VALUES["BASE"]
    rows.mkdir()
    base.mkdir()
    toy_rows(rows)
    path = toy_config(
        base, toy_model, rows,
        data={"dataset_name_or_path": f"{folder}/${{ROWS}}", "cache_dir": f"{folder}/${{CACHE}}",
              "prompt_template": "{question} ${WORD} => {answer}"},
        lora={"r": "${R}", "target_modules": ["q_proj", "${TARGET}"]},
        train={"max_steps": 2, "seed": "${SEED}", "save_strategy": "steps", "save_steps": 1, "output_dir": str(folder / "runs")},
        cluster={"env": {"HF_TOKEN": "${HUB}", "HOST": "${HOST}"}},
    )  # fmt: skip
    path.write_text(path.read_text().replace("'${R}'", "${R}").replace("'${SEED}'", "${SEED}"))  # as people write
    (folder / "run.yaml").write_text("extends: ${BASE}/run.yaml\n")
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def run(config: Path, shared_shardtune: Command) -> Path:
    done = shared_shardtune("train", config, "--run-id", "a", "--nproc", 1, env=VALUES)
    assert done.returncode == 0, done.stderr
    return config.parent / "runs" / "a"


def test_no_file_of_a_run_holds_what_came_from_the_environment(run: Path, shardtune: Command) -> None:
    assert shardtune("report", run).returncode == 0
    files = [file for file in run.rglob("*") if file.is_file()]
    assert {"report.html", "config.yaml", "run.json", "trainer.json", "events-rank0.jsonl"} <= {
        file.name for file in files
    }
    for file in files:
        # An adapter that is loaded elsewhere needs its numbers.
        if file.name not in ("adapter_config.json", "adapter_model.safetensors"):
            assert b"735197351" not in file.read_bytes(), file
    assert events(run, "data")[0]["folder"].startswith(f"{run.parent.parent}/${{CACHE}}/")


@pytest.mark.slow
def test_the_config_that_a_run_keeps_goes_on_with_it(run: Path, shardtune: Command) -> None:
    done = shardtune(
        "train", run / "config.yaml", "--nproc", 1, "--resume", "latest", "-o", "train.max_steps=3", env=VALUES
    )
    assert done.returncode == 0, done.stderr
    assert "step 2 of 3" in done.stdout and "another value" not in done.stdout
    assert not [file for file in run.parent.iterdir() if file.name != "a"]  # no new run


@pytest.mark.slow
def test_another_value_of_a_variable_is_a_refused_change(run: Path, config: Path, shardtune: Command) -> None:
    other = {**VALUES, "WORD": "other"}
    done = shardtune(
        "train", config, "--run-id", "a", "--nproc", 1, "--resume", "latest", "-o", "train.max_steps=4", env=other
    )
    assert done.returncode == 2
    assert "data.prompt_template: {question} ${WORD} => {answer} resolves to another value" in done.stderr
