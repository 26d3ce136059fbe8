"""The quick checks before a run of several processes, and the command itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from running import Command
from typer.testing import CliRunner

from shardtune.cli.main import app
from shardtune.config import ResolvedConfig, load_config
from shardtune.doctor.finding import fail
from shardtune.doctor.run import QUICK, make_checks, preflight, refuse_failed
from shardtune.doctor.system import System
from shardtune.errors import MachineError, UserInputError
from shardtune.launch.process_role import Node

YAML = "model: {{model_name_or_path: {0}}}\ndata: {{dataset_name_or_path: {1}, max_length: 32}}\ntrain: {{output_dir: {2}}}\n"


def asked(folder: Path) -> ResolvedConfig:
    (folder / "run.yaml").write_text(YAML.format("org/model", "org/data", folder / "runs"))
    return load_config(folder / "run.yaml")


def test_a_failed_check_refuses_the_run_before_a_process_is_started(
    shardtune: Command, toy_model: Path, toy_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(YAML.format(toy_model, toy_data, tmp_path / "runs"))
    refused = shardtune("train", tmp_path / "run.yaml", "--nproc", "2", env={"GLOO_SOCKET_IFNAME": "nope0"})
    assert refused.returncode == 2
    assert "This machine is not fit for the run: GLOO_SOCKET_IFNAME=nope0 names no interface" in refused.stderr
    assert "--skip-preflight" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_skip_preflight_starts_without_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr("shardtune.launch.start.start", lambda *args, **named: given.append(named["preflight"]))
    monkeypatch.setattr("shardtune.launch.rank_process.exit_process", lambda code: None)
    for words in ([], ["--skip-preflight"]):
        assert CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), *words]).exit_code == 0
    assert given == [preflight, None]


def test_warnings_are_printed_once_and_do_not_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight(asked(tmp_path), Node(), 2, {"TORCH_NCL_BLOCKING_WAIT": "1"})
    assert (
        capsys.readouterr().err.count("TORCH_NCL_BLOCKING_WAIT (= 1) is read by nothing. Did you mean TORCH_NCCL") == 1
    )


def test_a_broken_gpu_is_the_machines_fault_and_a_setting_the_users() -> None:
    with pytest.raises(MachineError, match="GPU 3 is not reachable"):
        refuse_failed([fail("gpu.reachable", "GPU 3 is not reachable", "Reset it."), fail("shm", "small", "More.")])
    with pytest.raises(UserInputError) as error:
        refuse_failed([fail("NCCL_NET", "no RDMA", "Unset it."), fail("cuda", "old driver", "Update.")])
    assert "cuda: old driver" in error.value.why and error.value.exit_code == 2


def test_a_check_that_cannot_be_made_is_a_warning() -> None:
    def check_disks(system: System, job: object) -> list[Any]:
        raise PermissionError(13, "Permission denied", "/x")

    (finding,) = make_checks(System(), Any, [check_disks])  # type: ignore[arg-type]
    assert finding.verdict == "warn" and "not checked" in finding.evidence and finding.check == "disks"


def test_the_quick_checks_take_no_seconds_on_this_machine(tmp_path: Path) -> None:
    began = time.process_time()
    preflight(asked(tmp_path), Node(), 2, {})
    assert time.process_time() - began < 2 and QUICK


def test_the_command_prints_all_checks_of_a_config_and_exits_by_the_worst(
    shardtune: Command, toy_model: Path, toy_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(YAML.format(toy_model, toy_data, tmp_path / "runs"))
    good = shardtune("doctor", tmp_path / "run.yaml", "--json")
    assert good.returncode == 0, good.stdout + good.stderr
    answer = json.loads(good.stdout)
    checks = {finding["check"]: finding for finding in answer["nodes"][0]["findings"]}
    assert {
        "packages",
        "model class",
        "memlock",
        "host memory",
        "output.space",
        "paths",
    } <= checks.keys()
    assert checks["model class"]["verdict"] == "ok" and answer["links"] is None
    assert "are needed" in checks["host memory"]["evidence"], "by the plan"
    assert checks["grace period"]["verdict"] == "ok" and "a checkpoint of" in checks["grace period"]["evidence"]
    bad = shardtune("doctor", tmp_path / "run.yaml", "-o", f"model.model_name_or_path={tmp_path / 'none'}")
    assert bad.returncode == 1 and "fail" in bad.stdout and "does not exist" in bad.stdout
    assert shardtune("doctor", tmp_path / "missing.yaml").returncode == 2
    impossible = shardtune("doctor", tmp_path / "run.yaml", "-o", "lora.target_modules=[nope_proj]")
    assert impossible.returncode == 1 and "plan: " in impossible.stdout and "nope_proj" in impossible.stdout
    imported = shardtune("doctor", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert "| torch\n" not in imported.stderr, "an init container has seconds, not minutes"
