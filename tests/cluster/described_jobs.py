"""Jobs for tests of renderers: a small config with a section `cluster`."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import yaml

from shardtune.cluster.spec import ClusterJob, make_job
from shardtune.config import load_config

RUN = {"model": {"model_name_or_path": "/models/m"}, "data": {"dataset_name_or_path": "/data/rows.jsonl"}}


def job_with(folder: Path, **cluster: Any) -> ClusterJob:
    """The job `ft` of a config with these settings of `cluster`."""
    file = folder / "run.yaml"
    file.write_text(
        yaml.safe_dump({**RUN, "cluster": {"job_name": "ft", **cluster}}, sort_keys=False), encoding="utf-8"
    )
    return make_job(load_config(file), file)


def executable(file: Path, text: str) -> Path:
    """A script that can be run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file
