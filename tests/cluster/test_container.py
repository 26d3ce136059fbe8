"""One container on this machine: the arguments of docker and podman."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from described_jobs import job_with

from shardtune.cluster.render_container import ContainerRun, Engine, check_secrets, render_container
from shardtune.errors import UserInputError

SITE: dict[str, Any] = {
    "image": "registry.example.com/shardtune:1",
    "image_pull_policy": "IfNotPresent",
    "gpus_per_node": 2,
    "cpu": "3500m",
    "memory": "64Gi",
    "shared_memory": "16Gi",
    "rdma": "infiniband",
    "capabilities": ["IPC_LOCK"],
    "run_as_uid": 1000,
    "run_as_gid": 0,
    "working_dir": "/runs",
    "volumes": [
        {"claim": "models", "path": "/models", "sub_path": "small", "read_only": True},
        {"claim": "runs", "path": "/runs"},
    ],
    "env": {"GREETING": "a b"},
    "secret_env": {"HF_TOKEN": "hub/token"},
    "grace_seconds": 200,
    "labels": {"team": "nlp"},
}


def rendered(folder: Path, engine: Engine = "docker", **changes: Any) -> ContainerRun:
    for name in ("models/small", "runs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folders = {"models": folder / "models", "runs": folder / "runs"}
    return render_container(job_with(folder, **{**SITE, **changes}), engine, folders, folder / "run.yaml")


def pairs(argv: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(argv))


def test_docker_gets_what_the_pod_would_get(tmp_path: Path) -> None:
    argv = rendered(tmp_path).argv
    assert argv[:5] == ("docker", "run", "--rm", "--name", "ft")
    assert {
        ("--gpus", "2"),
        ("--shm-size", str(16 * 2**30)),
        ("--memory", str(64 * 2**30)),
        ("--cpus", "3.5"),
        ("--device", "/dev/infiniband"),
        ("--ulimit", "memlock=-1:-1"),
        ("--network", "host"),
        ("--cap-add", "IPC_LOCK"),
        ("--user", "1000:0"),
        ("--workdir", "/runs"),
        ("--pull", "missing"),
        ("--label", "team=nlp"),
        ("--stop-timeout", "200"),
        ("--env", "GREETING=a b"),
        ("--mount", f"type=bind,source={tmp_path}/models/small,target=/models,readonly"),
        ("--mount", f"type=bind,source={tmp_path}/runs,target=/runs"),
        ("--mount", f"type=bind,source={tmp_path}/run.yaml,target=/etc/shardtune/run.yaml,readonly"),
    } <= pairs(argv)


def test_the_command_replaces_the_entry_point_as_in_a_pod(tmp_path: Path) -> None:
    argv = rendered(tmp_path).argv
    assert argv[argv.index("--entrypoint") :] == (
        "--entrypoint", "shardtune", "registry.example.com/shardtune:1", "train", "/etc/shardtune/run.yaml", "--run-id", "ft",
    )  # fmt: skip


def test_a_secret_is_passed_by_name_alone(tmp_path: Path) -> None:
    argv = rendered(tmp_path).argv
    assert ("--env", "HF_TOKEN") in pairs(argv)
    assert not [word for word in argv if word.startswith("HF_TOKEN=")]


def test_a_secret_that_is_not_in_the_environment_is_named(tmp_path: Path) -> None:
    job = job_with(tmp_path, **SITE)
    check_secrets(job, {"HF_TOKEN": "x"})
    with pytest.raises(UserInputError, match="HF_TOKEN is not set"):
        check_secrets(job, {"HF_TOKEN": ""})


def test_podman_gets_gpus_as_devices(tmp_path: Path) -> None:
    argv = rendered(tmp_path, "podman").argv
    assert argv[0] == "podman"
    assert {("--device", "nvidia.com/gpu=0"), ("--device", "nvidia.com/gpu=1")} <= pairs(argv)
    assert "--gpus" not in argv


def test_without_gpus_none_are_asked_for(tmp_path: Path) -> None:
    assert "--gpus" not in rendered(tmp_path, gpus_per_node=None).argv


def test_several_nodes_are_refused_with_what_runs_them(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="runs one container") as refused:
        rendered(tmp_path, nodes=3)
    assert "local-pods" in refused.value.fix


def test_a_claim_without_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"claim models\.") as refused:
        render_container(job_with(tmp_path, **SITE), "docker", {"runs": tmp_path}, tmp_path / "run.yaml")
    assert "--volume models=FOLDER" in refused.value.fix


def test_a_folder_for_no_claim_is_refused(tmp_path: Path) -> None:
    job = job_with(tmp_path, image="i")
    with pytest.raises(UserInputError, match="modles, which is no claim"):
        render_container(job, "docker", {"modles": tmp_path}, tmp_path / "run.yaml")


def test_a_folder_that_does_not_exist_is_refused_because_docker_would_make_it_as_root(tmp_path: Path) -> None:
    job = job_with(tmp_path, image="i", volumes=[{"claim": "runs", "path": "/runs"}])
    with pytest.raises(UserInputError, match="does not exist"):
        render_container(job, "docker", {"runs": tmp_path / "none"}, tmp_path / "run.yaml")


def test_a_comma_cannot_add_an_option_to_a_mount(tmp_path: Path) -> None:
    (tmp_path / "a,readonly").mkdir()
    job = job_with(tmp_path, image="i", volumes=[{"claim": "runs", "path": "/runs"}])
    with pytest.raises(UserInputError, match="comma"):
        render_container(job, "docker", {"runs": tmp_path / "a,readonly"}, tmp_path / "run.yaml")


def test_settings_that_mean_nothing_here_are_named_not_dropped(tmp_path: Path) -> None:
    found = rendered(tmp_path, namespace="ml", tolerations=[{"key": "gpu"}], queue="team")
    assert found.left_out == ("namespace", "tolerations", "queue")
    assert rendered(tmp_path).left_out == ()


@pytest.mark.parametrize(
    ("setting", "value"), [("pod_overlay", {"spec": {}}), ("env_from_secrets", ["a"]), ("fs_group", 5)]
)
def test_what_changes_the_container_and_cannot_be_had_is_refused(tmp_path: Path, setting: str, value: Any) -> None:
    with pytest.raises(UserInputError, match=f"cluster.{setting}"):
        rendered(tmp_path, **{setting: value})


def test_an_image_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"cluster\.image is not set"):
        rendered(tmp_path, image=None)


def test_every_setting_of_the_section_is_used_refused_or_named() -> None:
    """A new setting must be decided on for each renderer of this kind."""
    from shardtune.cluster import render_container as container
    from shardtune.cluster import render_slurm as slurm
    from shardtune.cluster.unsupported import NAMES_A_SCHEDULER
    from shardtune.config.cluster_schema import ClusterSection

    used_by_all = {"job_name", "nodes", "gpus_per_node", "gpu", "rdma", "env", "secret_env", "pip_index_url", "command",
                   "grace_seconds", "working_dir", "cpu", "memory"}  # fmt: skip
    used = {
        container: {"image", "image_pull_policy", "cpu_limit", "memory_limit", "shared_memory", "volumes", "capabilities",
                    "run_as_uid", "run_as_gid", "labels"} | set(container._OF_A_CLUSTER),
        slurm: {"ephemeral_storage", "max_hours", "restarts", "init_doctor"},
    }  # fmt: skip
    for module, own in used.items():
        known = used_by_all | own | set(module._REFUSED) | NAMES_A_SCHEDULER
        assert set(ClusterSection.model_fields) - known == set(), module.__name__
