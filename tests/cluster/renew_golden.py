"""Write the golden files anew: `python tests/cluster/renew_golden.py`. Read the difference before you commit it."""

from __future__ import annotations

import functools

from sample_jobs import GOLDEN, KINDS, rich_job, script_job, small_job

from shardtune.cluster.render import render, to_yaml


@functools.cache
def golden_texts() -> dict[str, str]:
    """By file name, what is rendered today."""
    jobs = {"one-node": small_job(1), "three-nodes": small_job(3), "rich": rich_job(3), "script": script_job(nodes=2)}
    return {f"{kind}-{name}.yaml": to_yaml(render(job, kind)) for kind in KINDS for name, job in jobs.items()}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file in GOLDEN.glob("*.yaml"):
        file.unlink()
    for file_name, text in golden_texts().items():
        (GOLDEN / file_name).write_text(text, encoding="utf-8")
