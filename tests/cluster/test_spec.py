"""A job is decided once: its name, command, environment, grace period, and the config its pods read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cluster.jobs import cluster_job, resolved_config, write_config

from shardtune.cluster.spec import make_job
from shardtune.config import load_config
from shardtune.errors import UserInputError


def test_the_main_process_is_the_launcher_as_argv(tmp_path: Path) -> None:
    job = cluster_job(tmp_path, nodes=3)
    assert job.command == ("shardtune", "train", "/etc/shardtune/run.yaml", "--run-id", "ft")


def test_a_command_of_the_users_own_replaces_it_and_gets_no_config(tmp_path: Path) -> None:
    job = cluster_job(tmp_path, command=["python", "train.py"])
    assert (job.command, job.config, job.output_dir) == (("python", "train.py"), None, None)


def test_without_a_name_the_job_is_called_after_its_file_and_two_submissions_differ(tmp_path: Path) -> None:
    file = write_config(tmp_path, name="My Run_7B.yaml", cluster={"image": "i"})
    names = {make_job(load_config(file, environ={}), file).name for _ in range(20)}
    assert len(names) > 1 and all(name.startswith("my-run-7b-") and len(name) == 14 for name in names)


@pytest.mark.parametrize("name", ["Upper", "9digits", "dash-", "dots.in.it", "a" * 41, "x_y"])
def test_a_name_that_pods_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserInputError, match="cannot be the name of a job"):
        cluster_job(tmp_path, job_name=name)


def test_the_pods_config_can_be_loaded_and_says_the_same(tmp_path: Path) -> None:
    resolved = resolved_config(tmp_path, "train.learning_rate=3e-5", "lora.r=7", nodes=3, env={"A": "b"})
    there = tmp_path / "there.yaml"
    there.write_text(make_job(resolved, tmp_path / "run.yaml").config or "", encoding="utf-8")
    again = load_config(there, environ={})
    for section in ("model", "lora", "data", "train", "parallel", "guards"):
        assert getattr(again.config, section) == getattr(resolved.config, section)
    assert (again.config.cluster.nodes, again.config.cluster.env) == (3, {})


def test_a_reference_reaches_the_pod_as_it_was_written(tmp_path: Path) -> None:
    resolved = resolved_config(tmp_path, "data.cache_dir=${CACHE}", environ={"CACHE": "/hidden/here"})
    config = make_job(resolved, tmp_path / "run.yaml").config or ""
    assert "cache_dir: ${CACHE}" in config and "/hidden/here" not in config


def test_pods_of_gpu_nodes_neither_count_gpus_nor_fall_back_to_the_cpu(tmp_path: Path) -> None:
    job = cluster_job(tmp_path, gpus_per_node=8)
    parallel = yaml.safe_load(job.config or "")["parallel"]
    assert (job.nproc, parallel["nproc"], parallel["device"]) == (8, 8, "cuda")


def test_what_accelerates_file_said_is_in_the_pods_config_without_the_file(tmp_path: Path) -> None:
    fsdp = tmp_path / "fsdp.yaml"
    fsdp.write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\nnum_machines: 2\n"
    )
    file = write_config(tmp_path, cluster={"image": "i", "job_name": "ft"}, parallel={"accelerate_config": "fsdp.yaml"})
    job = make_job(load_config(file, environ={}), file)
    parallel = yaml.safe_load(job.config or "")["parallel"]
    assert parallel["reshard_after_forward"] is False and "accelerate_config" not in parallel
    assert job.nodes == 2


def test_the_users_variables_win_over_ours_and_ours_say_why(tmp_path: Path) -> None:
    job = cluster_job(tmp_path, nodes=2, rdma="infiniband", env={"NCCL_NET": "Socket", "MINE": "1"})
    assert job.env["NCCL_NET"] == "Socket" and "NCCL_NET" not in job.reasons
    assert job.env["SHARDTUNE_NODES"] == "2" and set(job.reasons) == set(job.env) - {"NCCL_NET", "MINE"}


def test_rdma_forbids_the_fall_back_to_tcp(tmp_path: Path) -> None:
    assert cluster_job(tmp_path, rdma="roce").env["NCCL_NET"] == "IB"
    assert "NCCL_NET" not in cluster_job(tmp_path).env


def planned(step: float, checkpoint: int, shm: int = 0) -> Any:
    return SimpleNamespace(time=SimpleNamespace(seconds=step), host=SimpleNamespace(checkpoint=checkpoint, shm=shm))


def test_the_grace_period_covers_a_planned_step_and_save(tmp_path: Path) -> None:
    resolved, file = resolved_config(tmp_path), tmp_path / "run.yaml"
    assert make_job(resolved, file, planned(1, 10**6)).grace_seconds == 120
    long = make_job(resolved, file, planned(60, 40 * 10**9)).grace_seconds
    assert long >= 60 + 40e9 / 200e6
    asked = make_job(resolved_config(tmp_path, grace_seconds=77), file, planned(60, 10**9))
    assert (asked.grace_seconds, asked.env["SHARDTUNE_GRACE_SECONDS"]) == (77, "77")


def test_shared_memory_follows_the_plan_and_is_at_most_half_of_memory(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert make_job(resolved_config(tmp_path), file, planned(1, 1, shm=5 * 2**30)).shared_memory == 5 * 2**30
    assert make_job(resolved_config(tmp_path, memory="8Gi"), file, planned(1, 1, shm=2**40)).shared_memory == 4 * 2**30
    assert cluster_job(tmp_path, shared_memory="3Gi").shared_memory == 3 * 2**30
