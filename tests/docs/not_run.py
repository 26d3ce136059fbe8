"""Which commands of the pages does no test here run, and why? What is not in these tables is run."""

from __future__ import annotations

# Beginnings of commands that are not ours.
OTHERS: dict[str, str] = {
    "make quickstart": "tests/quickstart/test_run.py runs what it starts",
    "make speed-table": "needs the numbers of a GPU; tests/benchmarks/test_speed_table.py has some",
    "make": "a target of the Makefile, which must have it",
    "pip ": "needs a package index",
    "python3 -m venv": "needs a package index for what follows",
    "python benchmarks/gpu/": "needs a GPU; tests/benchmarks/test_speed_tiny.py runs it with toys",
    "python examples/retinanet/": "needs torchvision; tests/examples runs it",
    "podman ": "needs a container engine; tests/cluster/test_containerfile.py reads the Containerfile",
    "kubectl ": "needs a cluster",
    "vllm serve": "needs vLLM; its parser took the flags, and a test asks it where it is installed",
    "python -m sglang": "needs SGLang; the flags were read in its source",
    "openssl rand": "not ours",
    "export SHARDTUNE_SECRET": "a variable for the command after it, which is given one",
}
# Commands of ours, by the test that runs them instead. Each is still parsed.
ELSEWHERE: dict[str, str] = {
    "shardtune eval RUN --tasks": "tests/evaluation/test_harness_tasks.py, where lm-evaluation-harness is installed",
    "shardtune checkpoints outputs/": "tests/journeys/test_from_trl.py",
    "shardtune report outputs/": "tests/journeys/test_from_trl.py",
    "shardtune train runs/20261115-104512-3fa9/config.yaml --resume": "tests/run/test_best_of_ranks.py, without final/",
    "shardtune run --nproc 2 --name shapes -- examples/retinanet/": "tests/examples/test_detection_runs.py",
    "shardtune run --nproc 8 --name detector -- examples/retinanet/": "tests/examples/test_detection_runs.py",
}


def reason(text: str) -> str | None:
    """Why a command is not run; None: it is."""
    return next((why for start, why in {**OTHERS, **ELSEWHERE}.items() if text.startswith(start)), None)
