"""Behind `--` stands a script: `submit` and `cluster lint` make its job for every scheduler."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer
from cluster.conftest import Kube
from cluster.test_local_pods import needs_root
from running import Command, events
from sample_jobs import AWKWARD, KINDS, script_job

from shardtune.cluster.controllers import expand
from shardtune.cluster.pod_plan import expand_references
from shardtune.cluster.render import render
from shardtune.cluster.render_container import render_container
from shardtune.cluster.render_runai import runai_argv
from shardtune.cluster.render_slurm import render_slurm
from shardtune.cluster.shell_script import shell_script
from shardtune.config.script_config import load_script_config

IMAGE = "cluster.image=registry.example/ml@sha256:" + 64 * "0"
EXPECTED = ["run", "--config", "/etc/shardtune/run.yaml", "--name", "ft", "--", "train.py", *AWKWARD]


def started(manifests: Any) -> list[list[str]]:
    """The arguments with which a kubelet starts `shardtune` in each pod."""
    commands = [
        [expand_references(word, {"SHARDTUNE_NODES": "2", "HOME": "/x"}) for word in pod.command]
        for pod in expand(manifests)
    ]
    assert all(command[0] == "shardtune" for command in commands)
    return [command[1:] for command in commands]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_reach_the_script_as_they_stand_in_every_pod(kind: str) -> None:
    assert started(render(script_job(nodes=2), kind)) == [EXPECTED, EXPECTED]


def test_arguments_survive_the_printed_shell_script(tmp_path: Path) -> None:
    body = 'case "$*" in *jsonpath*) ;; get*) exit 1 ;; apply*) cat; echo --- ;; esac'
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "kubectl").chmod(0o755)
    text = shell_script(render(script_job(nodes=2), "job"), namespace=None, context=None)
    done = subprocess.run(
        ["sh"], input=text, capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert started([one for one in yaml.safe_load_all(done.stdout) if one]) == [EXPECTED, EXPECTED]


def test_arguments_survive_slurms_script(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    (tmp_path / "srun").chmod(0o755)
    done = subprocess.run(
        ["bash"], input=render_slurm(script_job(image="null")), capture_output=True, text=True, check=True,
        cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    words = done.stdout.split("\0")[:-1]
    file = Path(words[words.index("--config") + 1])
    assert words[words.index("run") :] == [str(file) if "run.yaml" in word else word for word in EXPECTED]
    settings = load_script_config(file, environ={}).config  # it is there, and is one of a script
    assert settings.cluster.nodes == 1


def test_arguments_survive_a_container_and_the_command_of_runai(tmp_path: Path) -> None:
    argv = render_container(script_job(), "docker", {}, tmp_path / "run.yaml").argv
    assert argv[argv.index("--entrypoint") + 1] == "shardtune" and list(argv[-len(EXPECTED) :]) == EXPECTED
    words = runai_argv(script_job(runai_project="p"), "cli")
    command = words[words.index("--command") + 2 :]
    assert [expand_references(word, {"SHARDTUNE_NODES": "2"}) for word in command] == ["shardtune", *EXPECTED]


def test_the_pods_settings_are_those_of_a_script_with_a_process_for_each_gpu(tmp_path: Path) -> None:
    job = script_job("train.py", nodes=3, gpus_per_node=4, env="{A: b}")
    file = tmp_path / "run.yaml"
    file.write_text(job.config or "")
    there = load_script_config(file, environ={}).config
    assert (job.nproc, there.parallel.nproc, there.parallel.device) == (4, 4, "cuda")
    assert (there.cluster.nodes, there.cluster.env, job.env["A"]) == (3, {}, "b")


@pytest.mark.parametrize(
    ("words", "stem"),
    [(["sub/Train_It.py"], "train-it"), (["-m", "pkg.train", "-x"], "pkg-train"), (["123.py"], "run-123")],
)
def test_without_a_name_the_job_is_called_after_its_script(words: list[str], stem: str) -> None:
    names = {script_job(*words, job_name="null").name for _ in range(20)}
    assert len(names) > 1 and {name[:-5] for name in names} == {stem}


@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_before_a_script_is_told_the_processes_and_reads_no_training(kind: str) -> None:
    (pod,) = expand(render(script_job(init_doctor="true", gpus_per_node=2), kind))
    assert [one["command"] for one in pod.init_containers] == [["shardtune", "doctor", "--this-node", "--nproc", "2"]]
    slurm = render_slurm(script_job(image="null", init_doctor="true", gpus_per_node=2))
    assert "srun --ntasks-per-node=1 shardtune doctor --nproc 2 ||" in slurm


# --- as users call it


def test_no_config_file_is_needed_where_the_command_line_has_the_image(kube: Kube) -> None:
    done = kube("submit", "--to", "jobset", "-o", IMAGE, "--dry-run", "client", "--", "train.py", "--lr", "-1", "a b")
    assert done.returncode == 0, done.stderr
    assert "script    train.py --lr -1 'a b'" in done.stdout
    assert "memory was not checked: what a script needs is not known before it runs" in done.stdout


def test_a_profile_gives_what_the_command_line_does_not(kube: Kube, home: Path) -> None:
    (home / ".config" / "shardtune").mkdir(parents=True)
    (home / ".config" / "shardtune" / "clusters.yaml").write_text("site: {target: job, image: x, working_dir: /code}\n")
    done = kube("submit", "-o", "cluster.profile=site", "--name", "ft", "--output", "yaml", "--", "-m", "pkg", "-h")
    (workload,) = [one for one in yaml.safe_load_all(done.stdout) if one["kind"] == "Job"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == "/code" and container["command"][-3:] == ["-m", "pkg", "-h"]


@pytest.mark.parametrize("spelling", [["{}"], ["--config", "{}"]])
def test_a_config_before_the_dashes_is_not_the_script(kube: Kube, tmp_path: Path, spelling: list[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("cluster: {image: x, target: slurm}\n")
    words = [word.format(file) for word in spelling]
    done = kube("submit", *words, "--nproc", 3, "-o", "cluster.image=null", "--print", "--", "train.py", file)
    assert done.returncode == 0, done.stderr
    assert f"-- train.py {shlex.quote(str(file))} &" in done.stdout and "nproc: 3" in done.stdout


TRAINING = "model: {model_name_or_path: m}\ndata: {dataset_name_or_path: d}\ncluster: {image: x, command: [python]}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "job", "--"], ["No script was given.", "-- script.py ARGS"]),
        (["--", "train.py"], ["Where does the job go?"]),
        (["--to", "job", "--bogus", "--", "train.py"], ["No such option", "--bogus"]),
        (["--to", "job", "train.py", "x", "--", "train.py"], ["unexpected extra argument (x)", "stands behind --"]),
        (["--to", "job"], ["Missing argument 'CONFIG' (or --config FILE, or -- SCRIPT)."]),
        (["--to", "job", "--", "run.yaml"], ["'run.yaml' is not a script.", "before the two dashes"]),
        (["--to", "job", "--", "torchrun", "train.py"], ["'torchrun' is not a script."]),
        (["--to", "job", "-o", "cluster.image=x", "-o", "cluster.gpus_per_node=1", "--nproc", "2", "--", "t.py"],
         ["parallel.nproc is 2, but a node has 1 GPU"]),
        (["--to", "job", "-o", "train.learning_rate=1", "--", "t.py"], ["train.learning_rate", "no effect on a script"]),
        (["--to", "job", "-o", "cluster.command=[a]", "--", "t.py"], ["the command line after `--`"]),
        (["run.yaml", "--to", "job", "--", "t.py"],
         ["run.yaml:1:1", "run.yaml:2:1", "no effect on a script", "run.yaml:3:21", "cluster.command"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [["submit"], ["cluster", "lint"]])
def test_wrong_command_lines_are_refused(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], words: list[str], said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(TRAINING)
    done = kube(*command, *words)
    text = " ".join((done.stderr + done.stdout).replace("│", " ").split())
    assert done.returncode in (1, 2) and all(part in text for part in said), text
    assert done.returncode == 2 or command[0] == "cluster", text


def test_lint_and_scc_look_at_a_scripts_job(kube: Kube) -> None:
    done = kube("cluster", "lint", "--to", "job", "-o", IMAGE, "--", "/nowhere/train.py")
    assert done.returncode == 0 and "script: /nowhere/train.py is on no mount" in done.stdout, done.stderr
    done = kube("cluster", "scc", "--to", "job", "-o", IMAGE, "--", "train.py")
    assert done.returncode == 0 and "restricted-v2 admits this job" in done.stdout, done.stderr


def test_what_was_sent_is_found_again_with_its_folder(server: ApiServer, kube: Kube) -> None:
    volume = "cluster.volumes=[{claim: runs, path: /runs}]"
    done = kube("submit", "--to", "job", "--nodes", 2, "--name", "ft", "-o", IMAGE, "-o", volume,
                "-o", "train.output_dir=/runs", "--", "train.py", "$(X)")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert server.names("configmaps", "secrets", "jobs") == ["configmaps/ft-config", "jobs/ft", "secrets/ft-nodes"]
    assert server.of("jobs")[0]["metadata"]["annotations"]["shardtune.dev/run-folder"] == "/runs/ft"
    assert "no pod has been created yet" in kube("status", "ft").stdout
    assert kube("describe", "ft").returncode == 0 and kube("cancel", "ft", "--yes").returncode == 0


# --- in pods on this machine

SUM = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", int(total), sys.argv[1:], flush=True)
if sys.argv[1] == "fail":
    sys.exit(7) if dist.get_rank() == 1 else time.sleep(100)
dist.destroy_process_group()
"""


@pytest.fixture
def pods(tmp_path: Path, shardtune: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A submission of SUM to two pods of one process each, with its code and its runs on volumes."""
    monkeypatch.chdir(tmp_path)  # local-pods writes to the current folder
    for name in ("code", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "sum.py").write_text(SUM)
    settings = {
        "cluster.working_dir": "/code", "train.output_dir": "/runs", "cluster.shared_memory": "64Mi",
        "cluster.volumes": "[{claim: code, path: /code, read_only: true}, {claim: runs, path: /runs}]",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    words += [word for name in ("code", "runs") for word in ("--volume", f"{name}={tmp_path / name}")]

    def submit(kind: str, *script: str) -> subprocess.CompletedProcess[str]:
        target = ["--to", "local-pods", "--kind", kind, "--nodes", 2, "--name", "ft"]
        return shardtune("submit", *target, *words, "--", *script)

    return submit


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_the_scripts_of_two_pods_find_each_other_and_leave_one_run(pods: Command, tmp_path: Path, kind: str) -> None:
    done = pods(kind, "sum.py", "ok", "a b", "$(HOSTNAME)")
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"[node {rank}] sum 3 ['ok', 'a b', '$(HOSTNAME)']" in done.stdout
        assert "sum 3" in (tmp_path / "runs" / "ft" / "logs" / f"rank-{rank}.log").read_text()
        assert events(tmp_path / "runs" / "ft", "run_end", rank)


@pytest.mark.slow
@needs_root
def test_the_exit_code_of_the_rank_that_failed_is_that_of_both_pods_and_a_restart_continues(
    pods: Command, tmp_path: Path
) -> None:
    for attempt in range(2):
        done = pods("pytorchjob", "sum.py", "fail")
        assert done.returncode == 7, done.stdout
        assert done.stdout.count("ended with exit code 7\n") == 2
        assert "Rank 1 (node 1, " in done.stdout and "ended with exit code 7 and no error message" in done.stdout
        assert ("started again" in done.stdout) == bool(attempt)
        assert "/runs/ft/logs/rank-1.log" in done.stdout
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["ft"]
