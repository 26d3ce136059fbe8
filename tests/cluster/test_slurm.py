"""The batch script is run with a `srun` and a `scontrol` that are played by scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from described_jobs import executable, job_with

from shardtune.cluster.render_slurm import render_slurm
from shardtune.config import load_config
from shardtune.errors import UserInputError


class FakeSlurm:
    """A folder on PATH with what the script calls, and what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.srun('printf "%s\\n" "$@" > "$LOG/srun"; env > "$LOG/env"')
        self.state("RUNNING")

    def srun(self, body: str, code: int = 0) -> None:
        executable(self.folder / "bin" / "srun", f"#!/bin/bash\nLOG={self.folder}\n{body}\nexit {code}\n")

    def state(self, state: str) -> None:
        shown = f"JobId=7 JobName=ft JobState={state} Reason=None"
        body = f'if [ "$1" = requeue ]; then echo "$2" >> {self.folder}/requeued; else echo "{shown}"; fi'
        executable(self.folder / "bin" / "scontrol", f"#!/bin/bash\n{body}\n")

    def start(self, script: str, **environ: str) -> subprocess.Popen[str]:
        file = self.folder / "job.sh"
        file.write_text(script, encoding="utf-8")
        environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **environ}
        return subprocess.Popen(
            ["bash", str(file)],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, script: str, **environ: str) -> tuple[int, str]:
        process = self.start(script, **environ)
        _, error = process.communicate(timeout=30)
        return process.returncode, error

    @property
    def requeued(self) -> int:
        file = self.folder / "requeued"
        return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


SITE: dict[str, Any] = {"nodes": 3, "gpus_per_node": 8, "cpu": "15500m", "memory": "256Gi", "max_hours": 1.5}


def test_the_directives_say_what_the_section_says(tmp_path: Path) -> None:
    found = directives(
        render_slurm(
            job_with(tmp_path, **SITE, working_dir="/runs/a b", sbatch={"partition": "gpu", "exclusive": "true"})
        )
    )
    job = job_with(tmp_path, **SITE)
    assert found == [
        "--job-name=ft",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=16",
        "--mem=262144M",
        "--time=90",
        "--chdir='/runs/a b'",
        f"--signal=B:USR1@{job.grace_seconds}",
        "--requeue",
        "--open-mode=append",
        "--output=ft-%j.log",
        "--partition=gpu",
        "--exclusive",
    ]


def test_a_sites_own_way_of_asking_for_gpus_replaces_ours(tmp_path: Path) -> None:
    found = directives(
        render_slurm(job_with(tmp_path, **SITE, sbatch={"gres": "gpu:h200:8", "mem": "0", "output": "x.log"}))
    )
    assert "--gres=gpu:h200:8" in found and "--mem=0" in found and "--output=x.log" in found
    assert not [one for one in found if one.startswith("--gpus-per-node") or one == "--mem=262144M" or "%j" in one]


@pytest.mark.parametrize(
    ("option", "instead"), [("nodes", "cluster.nodes"), ("ntasks", "Remove it"), ("signal", "grace_seconds")]
)
def test_an_option_that_a_setting_stands_for_is_refused(tmp_path: Path, option: str, instead: str) -> None:
    with pytest.raises(UserInputError, match=option) as refused:
        render_slurm(job_with(tmp_path, sbatch={option: "2"}))
    assert instead in refused.value.fix


@pytest.mark.parametrize("options", [{"--partition": "gpu"}, {"comment": "a\n#SBATCH --nodes=99"}, {"x y": "1"}])
def test_what_is_no_option_of_sbatch_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(UserInputError, match="is not an option of sbatch"):
        render_slurm(job_with(tmp_path, sbatch=options))


def test_two_time_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"max_hours and cluster\.sbatch\.time"):
        render_slurm(job_with(tmp_path, max_hours=1, sbatch={"time": "1:00:00"}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("image", "i"),
        ("volumes", [{"claim": "a", "path": "/a"}]),
        ("queue", "team"),
        ("node_selector", {"a": "b"}),
        ("pod_overlay", {"spec": {}}),
        ("shared_memory", "16Gi"),
        ("memory_limit", "1Gi"),
        ("env_from_secrets", ["a"]),
        ("extended_resources", {"rdma/hca": "1"}),
        ("namespace", "ml"),
    ],
)
def test_what_slurm_cannot_express_is_refused(tmp_path: Path, setting: str, value: Any) -> None:
    with pytest.raises(UserInputError, match=rf"Slurm cannot express cluster\.{setting}"):
        render_slurm(job_with(tmp_path, **{setting: value}))


def test_the_script_is_valid_bash_whatever_the_values_are(slurm: FakeSlurm, tmp_path: Path) -> None:
    nasty = 'it\'s "$HOME" `id` $(touch /tmp/no) \\ ; & |'
    script = render_slurm(job_with(tmp_path, **SITE, env={"NASTY": nasty}))
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    code, error = slurm.run(script)
    assert (code, error) == (0, "")
    assert f"NASTY={nasty}\n" in (slurm.folder / "env").read_text(encoding="utf-8")


def test_srun_starts_one_task_per_node_with_the_config_that_the_script_wrote(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = job_with(tmp_path, **SITE)
    slurm.run(render_slurm(job))
    config = slurm.folder / ".shardtune" / "ft" / "run.yaml"
    assert (slurm.folder / "srun").read_text(encoding="utf-8").splitlines() == [
        "--ntasks-per-node=1", "--kill-on-bad-exit=0", "shardtune", "train", str(config), "--run-id", "ft",
    ]  # fmt: skip
    assert config.read_text(encoding="utf-8") == job.config
    assert load_config(config).config.cluster.nodes == 3


def test_the_nodes_secret_is_made_in_the_job_and_written_nowhere(slurm: FakeSlurm, tmp_path: Path) -> None:
    script = render_slurm(job_with(tmp_path, **SITE))
    secrets = []
    for _ in range(2):
        slurm.run(script)
        lines = (slurm.folder / "env").read_text(encoding="utf-8").splitlines()
        secrets += [line.partition("=")[2] for line in lines if line.startswith("SHARDTUNE_SECRET=")]
    assert len(set(secrets)) == 2 and all(len(secret) == 64 for secret in secrets)
    (slurm.folder / "env").unlink()
    written = [file for file in slurm.folder.rglob("*") if file.is_file()]
    assert not [file for file in written if any(secret in file.read_text(encoding="utf-8") for secret in secrets)]


def test_a_single_node_needs_no_secret(tmp_path: Path) -> None:
    assert "openssl" not in render_slurm(job_with(tmp_path))


def test_a_secret_variable_comes_from_the_environment_of_sbatch(slurm: FakeSlurm, tmp_path: Path) -> None:
    script = render_slurm(job_with(tmp_path, secret_env={"HF_TOKEN": "hub/token"}))
    code, error = slurm.run(script)
    assert code != 0 and "HF_TOKEN is not set: export it before sbatch" in error
    assert slurm.run(script, HF_TOKEN="x")[0] == 0


def test_a_preempted_run_is_requeued_without_end(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.srun("", 75)
    script = render_slurm(job_with(tmp_path, restarts=0))
    for expected in (1, 2, 3):
        code, error = slurm.run(script)
        assert (code, slurm.requeued) == (75, expected)
        assert "stopped with a checkpoint: requeued" in error


def test_a_cancelled_job_is_not_requeued(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.srun("", 75)
    slurm.state("CANCELLED")
    code, error = slurm.run(render_slurm(job_with(tmp_path)))
    assert (code, slurm.requeued) == (75, 0)
    assert "no longer running" in error


def test_a_failure_is_requeued_as_often_as_there_are_restarts_and_success_starts_the_count_anew(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    script = render_slurm(job_with(tmp_path, restarts=2))
    slurm.srun("", 69)
    assert [slurm.run(script)[0] for _ in range(3)] == [69, 69, 69]
    assert slurm.requeued == 2
    slurm.srun("", 0)
    assert slurm.run(script)[0] == 0
    slurm.srun("", 1)
    slurm.run(script)
    assert slurm.requeued == 3


@pytest.mark.parametrize("code", [0, 2, 71, 130])
def test_what_would_fail_again_is_not_requeued(slurm: FakeSlurm, tmp_path: Path, code: int) -> None:
    slurm.srun("", code)
    assert slurm.run(render_slurm(job_with(tmp_path, restarts=5)))[0] == code
    assert slurm.requeued == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_srun_once_and_the_script_waits_for_its_result(
    slurm: FakeSlurm, tmp_path: Path, number: signal.Signals
) -> None:
    waiting = (
        'trap \'echo got >> "$LOG/signals"; sleep 0.5; exit 75\' USR1; touch "$LOG/ready"; while :; do sleep 0.05; done'
    )
    slurm.srun(waiting)
    process = slurm.start(render_slurm(job_with(tmp_path)))
    deadline = time.monotonic() + 20
    while not (slurm.folder / "ready").exists():
        assert time.monotonic() < deadline, "srun was not started"
        time.sleep(0.02)
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)  # Slurm repeats its signal; the run would exit at once on a second one
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert (slurm.folder / "signals").read_text(encoding="utf-8") == "got\n"
    assert slurm.requeued == 1


def test_the_doctor_runs_on_every_node_first(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.srun('echo "$@" >> "$LOG/srun"; case "$*" in *doctor*) exit 1 ;; esac')
    code, _ = slurm.run(render_slurm(job_with(tmp_path, init_doctor=True)))
    assert code == 2
    assert [line.split()[1:3] for line in (slurm.folder / "srun").read_text(encoding="utf-8").splitlines()] == [
        ["shardtune", "doctor"]
    ]


def test_a_command_of_the_users_own_gets_no_config(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.run(render_slurm(job_with(tmp_path, command=["apptainer", "exec", "my image.sif", "train"])))
    assert (slurm.folder / "srun").read_text(encoding="utf-8").splitlines()[2:] == [
        "apptainer",
        "exec",
        "my image.sif",
        "train",
    ]
    assert not (slurm.folder / ".shardtune" / "ft" / "run.yaml").exists()
