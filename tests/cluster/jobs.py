"""Jobs for tests: a config file with a section `cluster`, and the job it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shardtune.cluster.spec import ClusterJob, make_job
from shardtune.config import ResolvedConfig, load_config

IMAGE = "registry.example/ml/shardtune@sha256:" + "0" * 64
SMALLEST: dict[str, Any] = {
    "model": {"model_name_or_path": "/models/llama"},
    "data": {"dataset_name_or_path": "/data/train.jsonl"},
    "train": {"output_dir": "/runs"},
}


def write_config(folder: Path, *, name: str = "run.yaml", **sections: Any) -> Path:
    """A config in `folder`; `cluster={…}` and the others are sections over the smallest ones."""
    file = folder / name
    file.write_text(yaml.safe_dump({**SMALLEST, **sections}), encoding="utf-8")
    return file


def resolved_config(
    folder: Path, *overrides: str, environ: dict[str, str] | None = None, **cluster: Any
) -> ResolvedConfig:
    section = {"job_name": "ft", "image": IMAGE, **cluster}
    file = write_config(folder, cluster=section)
    return load_config(file, overrides, environ=environ or {}, cluster_profile=True)


def cluster_job(folder: Path, *overrides: str, environ: dict[str, str] | None = None, **cluster: Any) -> ClusterJob:
    """The job `ft` with these settings of `cluster`."""
    return make_job(resolved_config(folder, *overrides, environ=environ, **cluster), folder / "run.yaml")
