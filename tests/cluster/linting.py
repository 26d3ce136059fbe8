"""A job that lint has nothing to say about, and changes to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from shardtune.cluster.lint import lint
from shardtune.cluster.lint_finding import Finding
from shardtune.cluster.pod import merge_overlay
from shardtune.cluster.render_job import render_job
from shardtune.cluster.spec import ClusterJob, make_job
from shardtune.config import load_config

DIGEST = "@sha256:" + "0" * 64
GOOD: dict[str, Any] = {
    "model": {"model_name_or_path": "/models/llama"},
    "data": {"dataset_name_or_path": "/data/train.jsonl", "prompt_template": "{question}\n{answer}"},
    "train": {"output_dir": "/runs"},
    "cluster": {
        "job_name": "tune", "gpus_per_node": 8, "image": f"registry.example/ml/shardtune{DIGEST}", "cpu": "64",
        "memory": "512Gi",
        "volumes": [
            {"claim": "models", "path": "/models", "read_only": True},
            {"claim": "data", "path": "/data", "read_only": True},
            {"claim": "runs", "path": "/runs"},
        ],
        "env": {"NCCL_DEBUG": "WARN"},
        "secret_env": {"HF_TOKEN": "hub/token"},
        "pod_overlay": {
            "spec": {
                "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{"name": "trainer", "securityContext": {"capabilities": {"drop": ["ALL"]}}}],
            }
        },
    },
}  # fmt: skip


def overlay(**spec: Any) -> dict[str, Any]:
    """Changes of `cluster.pod_overlay.spec`."""
    return {"cluster": {"pod_overlay": {"spec": spec}}}


def trainer(**container: Any) -> dict[str, Any]:
    """Changes of the overlay's container."""
    return overlay(containers=[{"name": "trainer", **container}])


def cluster(**settings: Any) -> dict[str, Any]:
    return {"cluster": settings}


class Whole(dict[str, Any]):
    """A section that replaces the good one instead of changing it, so that its nulls are written."""


def job_of(folder: Path, changes: dict[str, Any]) -> ClusterJob:
    """The good job with changes; null removes a setting, lists of named things are merged."""
    file = folder / "run.yaml"
    whole = {name: dict(section) for name, section in changes.items() if isinstance(section, Whole)}
    others = {name: section for name, section in changes.items() if name not in whole}
    file.write_text(yaml.safe_dump({**merge_overlay(GOOD, others), **whole}))
    return make_job(load_config(file, environ={"MODEL": "/models/llama", "HOME": "/home/ana"}), file)


def lint_of(
    folder: Path, changes: dict[str, Any], target: str = "job", plan: Any = None, job: ClusterJob | None = None
) -> list[Finding]:
    job = job or job_of(folder, changes)
    return lint(job, render_job(job) if target == "job" else None, plan, target)


def fake_plan(**changes: Any) -> Any:
    """What lint reads of a plan, with a little of everything."""
    numbers = {"total": 60 << 30, "usable": 130 << 30, "per_node": 40 << 30, "shm": 1 << 30, "seconds": 5.0,
               "checkpoint": 1_000_000_000, **changes}  # fmt: skip
    return SimpleNamespace(
        memory=SimpleNamespace(total=numbers["total"]),
        usable=numbers["usable"],
        host=SimpleNamespace(
            per_node=numbers["per_node"], shm=numbers["shm"], checkpoint=numbers["checkpoint"]
        ),
        time=SimpleNamespace(seconds=numbers["seconds"]),
        cluster=SimpleNamespace(gpu=SimpleNamespace(name="H200")),
    )  # fmt: skip
