"""Jobs for the tests of renderers: the smallest one, and one that uses nearly every setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardtune.cluster.spec import CONFIG_FILE, CONFIG_FOLDER, ClusterJob, make_job
from shardtune.config.cluster_schema import ClusterSection
from shardtune.config.script_config import load_script_config
from shardtune.script.command import ScriptCommand

KINDS = ("trainjob", "pytorchjob", "jobset", "job")
CRDS = Path(__file__).parents[3] / "shared" / "crds"
GOLDEN = Path(__file__).parent / "golden"
_RUN_YAML = "model:\n  model_name_or_path: /models/m  # ‘m’\ndata:\n  dataset_name_or_path: /data/rows.jsonl\n"


def small_job(nodes: int = 1, **settings: Any) -> ClusterJob:
    section = {"image": "registry.example/shardtune:1", "gpus_per_node": 8, "cpu": "16", "memory": "256Gi"}
    return job_of({**section, "nodes": nodes, **settings}, name="ft")


def rich_job(nodes: int = 3, **settings: Any) -> ClusterJob:
    section: dict[str, Any] = {
        "namespace": "ml",
        "image": "registry.example/shardtune@sha256:" + "0" * 64,
        "image_pull_policy": "IfNotPresent",
        "image_pull_secrets": ["registry"],
        "gpus_per_node": 8,
        "cpu": "32",
        "memory": "512Gi",
        "ephemeral_storage": "50Gi",
        "shared_memory": "64Gi",
        "extended_resources": {"openshift.io/mellanoxnics": "1"},
        "rdma": "infiniband",
        "networks": ["ib0"],
        "annotations": {"example.org/cost-centre": "42"},
        "labels": {"team": "nlp"},
        "volumes": [
            {"claim": "models", "path": "/models", "read_only": True},
            {"claim": "runs", "path": "/runs", "sub_path": "nlp"},
        ],
        "env": {"NCCL_DEBUG": "INFO"},
        "secret_env": {"HF_TOKEN": "hub/token"},
        "env_from_secrets": ["proxy"],
        "service_account": "trainer",
        "run_as_uid": 1000,
        "fs_group": 1000,
        "capabilities": ["IPC_LOCK"],
        "node_selector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "topology_spread": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "topology": "example.org/rack",
        "queue": "nlp",
        "priority_class": "high",
        "working_dir": "/runs",
        "pod_overlay": {"spec": {"containers": [{"name": "trainer", "env": [{"name": "SITE", "value": "a"}]}]}},
    }
    return job_of({**section, "nodes": nodes, **settings}, name="rich")


# Everything that a shell, a kubelet or an option parser could take for something else.
AWKWARD = [
    "--lr",
    "-1",
    "a b",
    "it's",
    "$HOME",
    "$(SHARDTUNE_NODES)",
    "$$",
    "--",
    "-h",
    '{"a": [1]}',
    "",
    "line\nbreak",
]


def script_job(*words: str, **cluster: str | int) -> ClusterJob:
    """The job `ft` of a script, made from a command line alone. Settings of `cluster`, as -o takes them."""
    settings = {"job_name": "ft", "image": "registry.example/ml:1", **cluster}
    overrides = [f"cluster.{name}={value}" for name, value in settings.items()]
    resolved = load_script_config(None, overrides, {}, cluster_profile=True)
    return make_job(resolved, None, None, ScriptCommand.parse(words or ["train.py", *AWKWARD]))


def job_of(section: dict[str, Any], name: str) -> ClusterJob:
    settings = ClusterSection.model_validate(section)
    return ClusterJob(
        name=name,
        settings=settings,
        nproc=8,
        command=("shardtune", "train", f"{CONFIG_FOLDER}/{CONFIG_FILE}", "--run-id", name),
        env={**settings.env, "SHARDTUNE_NODES": str(settings.nodes)},
        config=_RUN_YAML,
        grace_seconds=300,
        shared_memory=64 * 2**30,
    )
