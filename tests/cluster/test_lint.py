"""Every rule reports what it is for, with the setting and the remedy, and leaves a good job alone."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster.linting import DIGEST, GOOD, Whole, cluster, fake_plan, job_of, lint_of, overlay, trainer
from rich.console import Console
from running import REPOSITORY
from sample_jobs import script_job

from shardtune.cluster import schemas
from shardtune.cluster.check import check_before_sending
from shardtune.cluster.lint import RULES, lint
from shardtune.cluster.lint_page import rules_page
from shardtune.cluster.manifests import Manifests
from shardtune.cluster.render import RENDERERS
from shardtune.cluster.render_job import render_job
from shardtune.cluster.spec import make_job
from shardtune.config import load_config
from shardtune.errors import UserInputError

PLAN = fake_plan()
TOKEN = "hf_" + "a" * 24


def env(**variables: str) -> dict[str, Any]:
    return cluster(env=variables)


def run(section: str, **settings: Any) -> dict[str, Any]:
    return {section: settings}


def raw_overlay(**template: Any) -> dict[str, Any]:
    """A job of two nodes with this overlay alone, nulls kept."""
    return {"cluster": Whole({**GOOD["cluster"], "nodes": 2, "pod_overlay": template})}


def plan(**numbers: Any) -> dict[str, Any]:
    return {"plan": fake_plan(**numbers)}


def to(target: str) -> dict[str, Any]:
    return {"target": target}


def script(*words: str, **settings: str) -> dict[str, Any]:
    """The job of a script, from a command line alone."""
    return {"job": script_job(*words, **settings), "plan": None}


# (rule, severity, changes, more arguments, path, words of what and fix)
REPORTED: list[tuple[str, str, dict[str, Any], dict[str, Any], str, str]] = [
    ("memory-unit", "error", cluster(memory=3846), {}, "cluster.memory", "3846 has no unit, and means 3,846 bytes → Write 3846Mi or 3846Gi"),
    ("memory-unit", "warning", cluster(memory=549755813888), {}, "cluster.memory", "means bytes (512 GiB) → Write 524288Mi"),
    ("memory-unit", "error", cluster(shared_memory="64"), {}, "cluster.shared_memory", "means 64 bytes"),
    ("memory-unit", "error", trainer(resources={"limits": {"memory": 4096}, "requests": {"memory": 4096}}), {}, "spec.template.spec.containers[0].resources.limits.memory", "4096 has no unit"),
    ("memory-too-small", "error", cluster(memory="512Mi"), {}, "cluster.memory", "512Mi is 512 MiB → Write at least 1Gi"),
    ("memory-too-small", "error", cluster(memory="96m"), {}, "cluster.memory", "96m is 0.096 bytes → Write 96G or 96Gi"),
    ("quantity", "error", cluster(memory="96GB"), {}, "cluster.memory", "Write 96G (powers of 1000) or 96Gi (of 1024)"),
    ("quantity", "error", cluster(memory="96gb"), {}, "cluster.memory", "Write 96G (powers"),
    ("quantity", "error", cluster(memory="96 G"), {}, "cluster.memory", "Write 96G (powers"),
    ("quantity", "error", cluster(memory="96g"), {}, "cluster.memory", "Write 96G (powers"),
    ("quantity", "error", cluster(memory_limit="96GiB"), {}, "cluster.memory_limit", "Write 96Gi."),
    ("quantity", "error", cluster(memory="lots"), {}, "cluster.memory", "such as 96Gi"),
    ("quantity", "error", cluster(cpu="16 cores"), {}, "cluster.cpu", "Write 16."),
    ("quantity", "error", cluster(ephemeral_storage="50GB"), {}, "cluster.ephemeral_storage", "Write 50G"),
    ("missing-memory", "warning", cluster(memory=None), {}, "cluster.memory", "evicted first"),
    ("missing-cpu", "warning", cluster(cpu=None), {}, "cluster.cpu", "Set cluster.cpu"),
    ("cpu-amount", "warning", cluster(cpu=500), {}, "cluster.cpu", "500 cores of each node → 500m would be"),
    ("cpu-amount", "error", cluster(cpu="16k"), {}, "cluster.cpu", "16,000 cores"),
    ("cpu-amount", "warning", cluster(cpu="500m"), {}, "cluster.cpu", "500m CPU cores for 8 processes"),
    ("request-above-limit", "error", cluster(memory_limit="256Gi"), {}, "spec.template.spec.containers[0].resources.requests.memory", "(512Gi) is above its limit (256Gi)"),
    ("extended-resource-amount", "error", trainer(resources={"requests": {"nvidia.com/gpu": "4"}}), {}, "spec.template.spec.containers[0].resources.limits", "nvidia.com/gpu: request 4, limit 8"),
    ("extended-resource-amount", "error", trainer(resources={"requests": {"rdma/hca": "1"}}), {}, "spec.template.spec.containers[0].resources.limits", "rdma/hca: request 1, limit none"),
    ("extended-resource-amount", "error", cluster(extended_resources={"example.com/nic": "0.5"}, rdma="roce"), {}, "cluster.extended_resources.example.com/nic", "not a whole number"),
    ("extended-resource-name", "error", cluster(extended_resources={"mellanoxnics": "1"}), {}, "cluster.extended_resources.mellanoxnics", "DOMAIN/NAME"),
    ("extended-resource-name", "error", cluster(extended_resources={"kubernetes.io/nic": "1"}), {}, "cluster.extended_resources.kubernetes.io/nic", "reserved"),
    ("extended-resource-name", "error", cluster(gpu_resource="gpu"), {}, "cluster.gpu_resource", "nvidia.com/gpu"),
    ("gpu-count", "warning", cluster(gpus_per_node=None), {}, "cluster.gpus_per_node", "no GPUs are requested"),
    ("gpu-count", "notice", {**cluster(gpus_per_node=None), **run("parallel", device="cpu")}, {}, "cluster.gpus_per_node", "Nothing, for a job without GPUs"),
    ("gpu-count", "error", run("parallel", nproc=16), {}, "cluster.gpus_per_node", "nproc is 16, but a node has 8 GPUs"),
    ("gpu-count", "error", cluster(extended_resources={"nvidia.com/gpu": "4"}), {}, "cluster.extended_resources.nvidia.com/gpu", "gpus_per_node is 8"),
    ("shm-size", "error", cluster(shared_memory="600Gi"), {}, "cluster.shared_memory", "/dev/shm (600Gi) is larger than the memory limit (512Gi)"),
    ("shm-size", "warning", trainer(volumeMounts=[{"mountPath": "/dev/shm", "name": "pvc-runs"}]), {}, "spec.template.spec.containers[0].volumeMounts", "64 MiB"),
    # volumes
    ("mount-without-volume", "error", trainer(volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}]), {}, "spec.template.spec.containers[0].volumeMounts[5]", "'scratch' is mounted at /scratch"),
    ("unused-volume", "warning", overlay(volumes=[{"name": "scratch", "emptyDir": {}}]), {}, "spec.template.spec.volumes[5]", "'scratch' is mounted by no container"),
    ("duplicate-mount", "error", cluster(volumes=[{"claim": "a", "path": "/runs"}, {"claim": "b", "path": "/runs/"}]), {}, "cluster.volumes[0].path", "two volumes are mounted at /runs"),
    ("mount-path", "error", cluster(volumes=[{"claim": "a", "path": "runs"}]), {}, "cluster.volumes[0].path", "'runs' is not absolute → Write the path in the container, such as /runs"),
    ("mount-path", "error", cluster(volumes=[{"claim": "a", "path": "/"}]), {}, "cluster.volumes[0].path", "nothing can be mounted at '/'"),
    ("shadowed-mount", "warning", cluster(volumes=[{"claim": "a", "path": "/runs"}, {"claim": "b", "path": "/runs/old"}]), {}, "cluster.volumes[1].path", "/runs/old is mounted inside /runs"),
    ("shadowed-mount", "warning", cluster(volumes=[{"claim": "a", "path": "/runs"}, {"claim": "b", "path": "/etc"}]), {}, "spec.template.spec.containers[0].volumeMounts", "/etc/shardtune is mounted inside /etc"),
    ("output-not-kept", "error", run("train", output_dir="/scratch/runs"), {}, "train.output_dir", "(/scratch/runs) is on no volume: the adapter is deleted with the pod → Set it to an absolute path on a volume of cluster.volumes, such as /runs."),
    ("output-not-kept", "error", run("train", output_dir="runs"), {}, "train.output_dir", "relative to the image's working directory"),
    ("output-not-kept", "error", {**run("train", output_dir="runs"), **cluster(working_dir="/workspace")}, {}, "train.output_dir", "(/workspace/runs) is on no volume"),
    ("output-not-kept", "error", {**run("train", output_dir="/tmp/runs"), "cluster": {"pod_overlay": {"spec": {**overlay()["cluster"]["pod_overlay"]["spec"], "volumes": [{"name": "tmp", "emptyDir": {}}], "containers": [{"name": "trainer", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}]}}}}, {}, "train.output_dir", "on the emptyDir volume 'tmp'"),
    ("output-not-kept", "warning", run("train", output_dir="/scratch"), to("docker"), "train.output_dir", "on no volume"),
    ("read-only-output", "error", run("train", output_dir="/models/runs"), {}, "train.output_dir", "/models/runs is on the read-only mount /models"),
    ("read-only-output", "error", run("data", cache_dir="/data/cache"), {}, "data.cache_dir", "/data/cache is on the read-only mount /data"),
    ("input-not-mounted", "warning", run("model", model_name_or_path="/mnt/llama"), {}, "model.model_name_or_path", "/mnt/llama is on no mount"),
    ("input-not-mounted", "warning", run("data", dataset_name_or_path="rows.jsonl"), {}, "data.dataset_name_or_path", "rows.jsonl is on no mount"),
    ("input-not-mounted", "warning", run("model", model_name_or_path="~/llama"), {}, "model.model_name_or_path", "~/llama is on no mount"),
    ("shared-claim", "notice", cluster(nodes=2), {}, "cluster.volumes", "2 pods mount models, data, runs"),
    # names
    ("object-name", "error", cluster(service_account="Trainer_1"), {}, "cluster.service_account", "'Trainer_1' cannot be a name"),
    ("object-name", "error", cluster(volumes=[{"claim": "my_runs", "path": "/runs"}]), {}, "cluster.volumes[0].claim", "'my_runs'"),
    ("label", "error", cluster(labels={"team": "a" * 64}), {}, "cluster.labels.team", "64 characters"),
    ("label", "error", cluster(labels={"team": "ml ops"}), {}, "cluster.labels.team", "'ml ops' cannot be a label's value"),
    ("label", "error", cluster(node_selector={"-gpu": "h200"}), {}, "cluster.node_selector.-gpu", "key of a label"),
    ("label", "error", cluster(pod_overlay={"metadata": {"labels": {"owner": "ana@example.com"}}}), {}, "spec.template.metadata.labels.owner", "'ana@example.com' cannot be"),
    ("annotation", "error", cluster(annotations={"a/b/c": "x"}), {}, "cluster.annotations.a/b/c", "key of an annotation"),
    ("env-name", "error", env(**{"2FAST": "x"}), {}, "cluster.env.2FAST", "cannot be the name of a variable"),
    ("env-twice", "warning", env(HF_TOKEN="x"), {}, "cluster.env.HF_TOKEN", "in env and in secret_env"),
    ("secret-reference", "error", cluster(secret_env={"KEY": "hub"}), {}, "cluster.secret_env.KEY", "is not SECRET/KEY"),
    # image, start and end
    ("image-missing", "error", cluster(image=None), {}, "cluster.image", "there is no image"),
    ("image-not-pinned", "warning", cluster(image="registry.example/a/b:latest"), {}, "cluster.image", "`latest` may be another image tomorrow → Add its digest: registry.example/a/b@sha256:"),
    ("image-not-pinned", "warning", cluster(image="registry.example:5000/a/b"), {}, "cluster.image", "has no tag"),
    ("image-not-pinned", "warning", cluster(image="a/b:1.2"), {}, "cluster.image", "the tag 1.2 may be"),
    ("image-not-pinned", "warning", overlay(initContainers=[{"name": "fetch", "image": "fetch:3"}]), {}, "spec.template.spec.initContainers[0].image", "fetch:3"),
    ("init-image", "warning", cluster(nodes=2), to("pytorchjob"), "cluster.image", "alpine:3.10"),
    ("init-image", "warning", cluster(nodes=2, runai_kind="pytorchjob"), to("runai"), "cluster.image", "alpine:3.10"),
    ("extra-container", "error", overlay(containers=[{"name": "pytorch-2", "env": []}]), {}, "spec.template.spec.containers[1]", "'pytorch-2' has no image → The container that trains is called `trainer`"),
    ("extra-container", "warning", overlay(containers=[{"name": "logs", "image": "a" + DIGEST}]), {}, "spec.template.spec.containers[1]", "runs beside the training"),
    ("shell-command", "warning", cluster(command=["bash", "-c", "pip install x && shardtune train r.yaml"]), {}, "cluster.command", "passes SIGTERM to nothing"),
    ("shell-command", "warning", trainer(command=["/bin/sh", "-ec", "sleep 1; shardtune train r.yaml"]), {}, "spec.template.spec.containers[0].command", "exec"),
    ("topology-without-queue", "error", cluster(topology="topology.example/block"), {}, "cluster.topology", "there is no queue"),
    ("gang", "notice", cluster(nodes=3), {}, "cluster.gang_scheduling", "nothing guarantees that all 3 pods start together"),
    ("gang", "warning", cluster(nodes=3, queue="ml", gang_scheduling="volcano"), to("pytorchjob"), "cluster.gang_scheduling", "Kueue starts all pods"),
    ("gang", "warning", cluster(nodes=3, gang_scheduling="coscheduling"), to("runai"), "cluster.gang_scheduling", "Run:ai starts all pods"),
    ("grace-period", "warning", cluster(grace_seconds=30), plan(seconds=60.0), "cluster.grace_seconds", "30 s are too short for a step and a save (65 s by the plan"),
    ("grace-period", "warning", overlay(terminationGracePeriodSeconds=30), {}, "spec.template.spec.terminationGracePeriodSeconds", "killed after 30 s, but the run is told 600 s"),
    ("grace-period", "warning", overlay(terminationGracePeriodSeconds=5), {}, "spec.template.spec.terminationGracePeriodSeconds", "→ Remove it: 600 s are the time to save"),
    ("grace-period", "warning", overlay(terminationGracePeriodSeconds=900), {}, "spec.template.spec.terminationGracePeriodSeconds", "→ Remove it, and set cluster.grace_seconds: 900."),
    # what the overlay leaves, and schemas
    ("restart-policy", "error", overlay(restartPolicy="Always"), {}, "cluster.pod_overlay.spec.restartPolicy", "restartPolicy: Always: the API server takes"),
    ("restart-policy", "error", overlay(restartPolicy="OnFailure"), {}, "cluster.pod_overlay.spec.restartPolicy", "with Never alone"),
    ("restart-policy", "warning", overlay(restartPolicy="Always"), to("pytorchjob"), "cluster.pod_overlay.spec.restartPolicy", "the training operator overwrites it → Remove it. cluster.restarts (3)"),
    ("no-command", "error", raw_overlay(spec={"containers": [{"name": "trainer", "command": None}]}), {}, "spec.template.spec.containers[0].command", "the image's own would run"),
    ("no-command", "error", trainer(command=[]), {}, "spec.template.spec.containers[0].command", "the image's own would run"),
    ("removed-variable", "error", raw_overlay(spec={"containers": [{"name": "trainer", "env": None}]}), {}, "spec.template.spec.containers[0].env", "MASTER_ADDR, MASTER_PORT, NCCL_DEBUG, SHARDTUNE_NODES, SHARDTUNE_GRACE_SECONDS, PYTHONUNBUFFERED, HF_TOKEN, SHARDTUNE_SECRET"),
    ("removed-label", "error", raw_overlay(metadata={"labels": {"shardtune.dev/run": None}}), {}, "spec.template.metadata.labels", "shardtune.dev/run"),
    ("removed-label", "error", cluster(pod_overlay={"metadata": {"labels": {"app.kubernetes.io/instance": "other"}}}), {}, "spec.template.metadata.labels", "found: app.kubernetes.io/instance →"),
    ("schema", "error", trainer(command="bash"), {}, "spec.template.spec.containers[0].command", "must be a list → Correct it in cluster.pod_overlay"),
    ("schema", "error", trainer(env=[{"name": "A", "value": 3}]), {}, "spec.template.spec.containers[0].env[5].value", "must be text"),
    ("schema", "error", trainer(comand=["x"]), {}, "spec.template.spec.containers[0].comand", "unknown field; did you mean `command`?"),
    ("schema", "error", overlay(hostNetwork="yes"), {}, "spec.template.spec.hostNetwork", "must be true or false, is the text 'yes'"),
    ("schema", "error", cluster(pod_overlay={"metadata": {"labels": {"a": {"b": 1}}}}), {}, "spec.template.metadata.labels.a", "must be text"),
    # plan
    ("batch-size", "error", {**run("train", effective_batch_size=64), **cluster(nodes=3)}, {"plan": None}, "train.effective_batch_size", "64, which 24 processes cannot divide evenly → Set it to 48 or 72"),
    ("batch-size", "error", run("train", effective_batch_size=64, per_device_train_batch_size=3), {"plan": None}, "train.effective_batch_size", "per_device_train_batch_size: 3"),
    ("gpu-memory", "error", {}, plan(total=140 << 30), "cluster.gpus_per_node", "a GPU needs 140 GiB by the plan; 130 GiB of a H200 are usable"),
    ("gpu-memory", "warning", run("guards", memory_plan="warn"), plan(total=140 << 30), "cluster.gpus_per_node", "140 GiB"),
    ("host-memory", "error", cluster(memory="40Gi"), {}, "cluster.memory", "a node needs 41 GiB by the plan (1 GiB of it in /dev/shm); the limit is 40Gi"),
    ("shm-plan", "error", cluster(shared_memory="512Mi"), {}, "cluster.shared_memory", "/dev/shm has 512 MiB; data workers and NCCL need 1 GiB"),
    ("memory-not-checked", "notice", {}, {"plan": None}, "cluster.gpu", "no GPU is named"),
    ("memory-not-checked", "notice", cluster(gpu="H200"), {"plan": None}, "model.model_name_or_path", "not on this machine"),
    # secrets
    ("secret-in-env", "error", env(WANDB_API_KEY="x1y2z3"), {}, "cluster.env.WANDB_API_KEY", "cluster.secret_env: {WANDB_API_KEY: SECRET/KEY}"),
    ("secret-in-env", "error", env(EXTRA=TOKEN), {}, "cluster.env.EXTRA", "EXTRA is a secret"),
    ("secret-in-env", "error", env(PROXY="http://ana:hunter22@proxy.example"), {}, "cluster.env.PROXY", "PROXY is a secret"),
    ("secret-in-env", "error", trainer(env=[{"name": "AWS_SECRET_ACCESS_KEY", "value": "x" * 40}]), {}, "spec.template.spec.containers[0].env[5]", "AWS_SECRET_ACCESS_KEY"),
    ("secret-in-command", "error", cluster(command=["python", "t.py", "--hf-token", "x1y2z3"]), {}, "cluster.command[3]", "(--hf-token)"),
    ("secret-in-command", "error", cluster(command=["python", "t.py", "--api-key=x1y2z3"]), {}, "cluster.command[2]", "(--api-key)"),
    ("secret-in-command", "error", trainer(args=["login", TOKEN]), {}, "spec.template.spec.containers[0].args[1]", "the word 1 holds a secret"),
    ("secret-in-metadata", "error", cluster(annotations={"example.com/token": "x1y2z3"}), {}, "cluster.annotations.example.com/token", "holds a secret"),
    ("secret-in-metadata", "error", cluster(pod_overlay={"metadata": {"annotations": {"note": TOKEN}}}), {}, "spec.template.metadata.annotations.note", "holds a secret"),
    ("secret-in-config", "error", run("model", revision=TOKEN), {}, "model.revision", "it is a secret, or holds one"),
    ("secret-in-config", "error", run("data", dataset_name_or_path="https://ana:hunter22@data.example/a.jsonl"), {}, "data.dataset_name_or_path", "Write ${NAME} there"),
    ("secret-in-index-url", "error", cluster(pip_index_url="https://ana:hunter22@index.example/simple"), {}, "cluster.pip_index_url", "credentials"),
    ("secret-in-index-url", "error", cluster(pip_index_url="https://sometoken@index.example/simple"), {}, "cluster.pip_index_url", "credentials"),
    ("unset-reference", "error", run("model", model_name_or_path="${MODEL}"), {}, "model.model_name_or_path", "the pod has no variable MODEL"),
    ("unset-reference", "warning", run("model", model_name_or_path="${MODEL}"), to("slurm"), "model.model_name_or_path", "MODEL"),
    ("unset-reference", "warning", {**run("model", model_name_or_path="${MODEL}"), **cluster(env_from_secrets=["paths"])}, {}, "model.model_name_or_path", "unless it is a key of paths"),
    ("unset-reference", "warning", run("train", fallback_dir="${HOME}/runs"), {}, "train.fallback_dir", "the container's HOME"),
    # NCCL
    ("nccl-unknown", "warning", env(NCCL_TIMEOUT="1800"), {}, "cluster.env.NCCL_TIMEOUT", "is read by none of NCCL 2.27.7 to 2.32.3 → Unset it; set parallel.step_timeout_minutes"),
    ("nccl-unknown", "warning", env(NCCL_IB_HCAS="mlx5"), {}, "cluster.env.NCCL_IB_HCAS", "Did you mean NCCL_IB_HCA?"),
    ("nccl-unknown", "warning", env(NCCL_BLOCKING_WAIT="1"), {}, "cluster.env.NCCL_BLOCKING_WAIT", "Write TORCH_NCCL_BLOCKING_WAIT"),
    ("nccl-unknown", "warning", trainer(env=[{"name": "TORCH_NCCL_NONSENSE", "value": "1"}]), {}, "spec.template.spec.containers[0].env[5]", "TORCH_NCCL_NONSENSE"),
    ("nccl-unknown", "notice", env(NCCL_RUN_DIAGNOSTICS="1"), {}, "cluster.env.NCCL_RUN_DIAGNOSTICS", "by NCCL 2.31.2, NCCL 2.32.3 only"),
    ("nccl-no-effect", "warning", {"cluster": {**env(NCCL_SOCKET_NTHREADS="4")["cluster"], "rdma": "roce", "extended_resources": {"rdma/nic": "1"}}}, {}, "cluster.env.NCCL_SOCKET_NTHREADS", "is for TCP"),
    ("nccl-no-effect", "warning", env(NCCL_IB_SPLIT_DATA_ON_QPS="1"), {}, "cluster.env.NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_IB_QPS_PER_CONNECTION above 1"),
    ("nccl-no-effect", "warning", env(NCCL_IB_HCA="mlx5"), {}, "cluster.env.NCCL_IB_HCA", "the pod has no RDMA device"),
    ("nccl-default", "notice", env(NCCL_IB_DISABLE="0"), {}, "cluster.env.NCCL_IB_DISABLE", "is NCCL's default"),
    ("nccl-tcp", "error", cluster(rdma="infiniband", env={"NCCL_IB_DISABLE": "1"}), {}, "cluster.env.NCCL_IB_DISABLE", "turns RDMA off, but cluster.rdma is infiniband"),
    ("nccl-tcp", "error", cluster(rdma="roce", env={"NCCL_NET": "Socket"}), {}, "cluster.env.NCCL_NET", "NCCL_NET=Socket turns RDMA off"),
    ("nccl-interface", "warning", env(NCCL_SOCKET_IFNAME="ib0"), {}, "cluster.env.NCCL_SOCKET_IFNAME", "not the InfiniBand device"),
    ("nccl-interface", "warning", env(NCCL_SOCKET_IFNAME="mlx5_0,mlx5_1"), {}, "cluster.env.NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    ("nccl-interface", "warning", env(GLOO_SOCKET_IFNAME="eth0"), {}, "cluster.env.GLOO_SOCKET_IFNAME", "without an interface of that name"),
    ("visible-devices", "error", env(CUDA_VISIBLE_DEVICES="0"), {}, "cluster.env.CUDA_VISIBLE_DEVICES", "the device plugin says"),
    ("visible-devices", "error", trainer(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]), {}, "spec.template.spec.containers[0].env[5]", "NVIDIA_VISIBLE_DEVICES"),
    ("two-allocators", "error", env(PYTORCH_ALLOC_CONF="a", PYTORCH_CUDA_ALLOC_CONF="a"), {}, "cluster.env.PYTORCH_CUDA_ALLOC_CONF", "Keep PYTORCH_ALLOC_CONF"),
    ("reserved-variable", "error", env(RANK="0"), {}, "cluster.env.RANK", "differently for each pod"),
    ("reserved-variable", "error", env(PET_NNODES="2"), {}, "cluster.env.PET_NNODES", "PET_NNODES"),
    ("reserved-variable", "error", env(SHARDTUNE_NODES="2"), {}, "cluster.env.SHARDTUNE_NODES", "Remove it"),
    ("reserved-variable", "error", trainer(env=[{"name": "MASTER_ADDR", "value": "a"}]), {}, "spec.template.spec.containers[0].env[5]", "MASTER_ADDR"),
    ("rdma-without-nic", "error", cluster(rdma="infiniband"), {}, "cluster.extended_resources", "no NIC is requested"),
    ("rdma-without-nic", "warning", cluster(rdma="roce", networks=["roce-net"]), {}, "cluster.extended_resources", "no NIC"),
    ("rdma-memlock", "warning", cluster(rdma="roce", extended_resources={"rdma/nic": "1"}), {}, "cluster.rdma", "`shardtune doctor` in the pod"),
    ("nic-without-rdma", "warning", cluster(extended_resources={"openshift.io/mellanoxnics": "1"}), {}, "cluster.rdma", "openshift.io/mellanoxnics is requested, but cluster.rdma is none"),
    # a script
    ("script-not-mounted", "warning", {}, script(__file__), "script", "is on no mount, so it must be in the image: the file on this machine is not sent"),
    ("script-not-mounted", "notice", {}, script("/nowhere/train.py", volumes="[{claim: c, path: /code}]"), "script", "/nowhere/train.py is on no mount"),
    ("script-not-mounted", "notice", {}, script("nowhere.py"), "script", "nowhere.py is relative to the image's working directory"),
    ("script-not-here", "warning", {}, {**script("train.py", working_dir="/nowhere"), **to("slurm")}, "script", "there is no file /nowhere/train.py on this machine"),
    ("output-not-kept", "warning", {}, script("train.py", working_dir="/code"), "train.output_dir", "the run's logs and records are deleted"),
    ("secret-in-command", "error", {}, script("train.py", "--api-key", TOKEN), "script[2]", "the word 2 holds a secret (--api-key)"),
    # security
    ("fixed-uid", "warning", cluster(run_as_uid=2000), {}, "cluster.run_as_uid", "`restricted-v2` refuses the user id 2000"),
    ("fixed-uid", "warning", trainer(securityContext={"runAsUser": 0}), {}, "spec.template.spec.containers[0].securityContext.runAsUser", "refuses root as well"),
    ("fs-group", "warning", cluster(fs_group=2000), {}, "cluster.fs_group", "refuses the volume group 2000"),
    ("capability", "warning", cluster(capabilities=["IPC_LOCK"]), {}, "cluster.capabilities", "refused by `restricted-v2`"),
    ("capability", "error", cluster(capabilities=["CAP_IPC_LOCK"]), {}, "cluster.capabilities", "Write IPC_LOCK."),
    ("capability", "warning", trainer(securityContext={"capabilities": {"add": ["SYS_PTRACE"]}}), {}, "spec.template.spec.containers[0].securityContext.capabilities.add", "SYS_PTRACE"),
    ("ipc-lock", "warning", cluster(capabilities=["IPC_LOCK"]), {}, "cluster.capabilities", "does nothing for a user other than root"),
    ("ipc-lock", "warning", cluster(capabilities=["IPC_LOCK"], run_as_uid=2000), {}, "cluster.capabilities", "does nothing for user 2000"),
    ("privileged", "warning", trainer(securityContext={"privileged": True}), {}, "spec.template.spec.containers[0].securityContext.privileged", "a privileged container"),
    ("privileged", "warning", trainer(securityContext={"allowPrivilegeEscalation": True}), {}, "spec.template.spec.containers[0].securityContext.allowPrivilegeEscalation", "refused by"),
    ("host-access", "warning", overlay(hostNetwork=True), {}, "spec.template.spec.hostNetwork", "hostNetwork: refused by"),
    ("host-access", "warning", overlay(hostIPC=True), {}, "spec.template.spec.hostIPC", "hostIPC"),
    ("host-access", "warning", overlay(volumes=[{"name": "d", "hostPath": {"path": "/dev"}}]), {}, "spec.template.spec.volumes[5]", "hostPath volume 'd'"),
    ("host-access", "warning", trainer(ports=[{"containerPort": 1, "hostPort": 1}]), {}, "spec.template.spec.containers[0].ports[0]", "hostPort 1"),
    ("pod-security", "notice", overlay(securityContext=None), {}, "spec.template.spec.containers[0].securityContext", "it lacks runAsNonRoot, seccompProfile"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "severity", "changes", "more", "path", "words"),
    REPORTED,
    ids=[f"{index}-{row[0]}" for index, row in enumerate(REPORTED)],
)
def test_a_mistake_is_reported_at_its_place_with_its_remedy(
    tmp_path: Path, rule: str, severity: str, changes: dict[str, Any], more: dict[str, Any], path: str, words: str
) -> None:
    found = [one for one in lint_of(tmp_path, changes, **{"plan": PLAN, **more}) if one.rule == rule]
    texts = [f"{one.severity} {one.path}: {one.what} → {one.fix}" for one in found]
    assert any(one.severity == severity and one.path == path and words in f"{one.what} → {one.fix}" for one in found), (
        texts or "nothing was reported"
    )


def test_every_rule_has_a_case_and_reports_nothing_worse_than_its_page_says() -> None:
    by_rule: dict[str, set[str]] = {}
    for rule, severity, *_ in REPORTED:
        by_rule.setdefault(rule, set()).add(severity)
    rules = {rule.name: rule for group in RULES.values() for rule in group}
    assert set(by_rule) | {"name-length", "schema-not-checked"} == set(rules)
    for name, severities in by_rule.items():
        assert rules[name].severity in severities, name
        worse = {"error": set(), "warning": {"error"}, "notice": {"error", "warning"}}[rules[name].severity]
        assert not severities & worse, name


@pytest.mark.parametrize("target", ["job", "jobset", "trainjob", "runai", "slurm", "docker", "podman", "local-pods"])
def test_a_good_job_has_no_findings(tmp_path: Path, target: str) -> None:
    assert lint_of(tmp_path, {}, target=target, plan=PLAN) == []


QUIET: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("memory-unit", cluster(memory="1Ti"), {}),
    ("quantity", cluster(cpu="16500m"), {}),
    ("cpu-amount", cluster(cpu="256"), {}),
    ("extended-resource-amount", cluster(extended_resources={"example.com/nic": "2"}, rdma="roce"), {}),
    ("extended-resource-name", cluster(extended_resources={"hugepages-2Mi": "1Gi"}), {}),
    ("gpu-count", cluster(extended_resources={"nvidia.com/gpu": "8"}), {}),
    ("shm-size", cluster(shared_memory="64Gi"), {}),
    ("input-not-mounted", run("model", model_name_or_path="org/model"), {}),  # a Hub's name
    ("input-not-mounted", run("data", dataset_name_or_path="s3://bucket/rows.jsonl"), {}),
    ("input-not-mounted", {**run("data", dataset_name_or_path="rows.jsonl"), **cluster(working_dir="/data")}, {}),
    ("output-not-kept", {**run("train", output_dir="out"), **cluster(working_dir="/runs")}, {}),
    ("output-not-kept", run("train", output_dir="out"), to("slurm")),
    ("shared-claim", {}, {}),  # one node
    ("image-missing", cluster(image=None), to("slurm")),
    ("image-missing", cluster(image=None), to("local-pods")),
    ("init-image", {}, to("pytorchjob")),  # one node has no workers
    ("init-image", cluster(nodes=2), to("jobset")),
    ("init-image", cluster(nodes=2, image=f"shardtune{DIGEST}"), to("pytorchjob")),
    ("extra-container", cluster(init_doctor=True), {}),
    ("shell-command", cluster(command=["sh", "-c", "pip install x && exec shardtune train r.yaml"]), {}),
    ("shell-command", cluster(command=["sh", "-c", "shardtune train r.yaml"]), {}),  # shells replace themselves
    ("topology-without-queue", cluster(topology="topology.example/block", queue="ml"), {}),
    ("gang", cluster(nodes=3, queue="ml"), {}),
    ("gang", cluster(nodes=3), to("runai")),
    ("grace-period", cluster(grace_seconds=120), plan(seconds=60.0)),
    ("batch-size", {**run("train", effective_batch_size=48), **cluster(nodes=3)}, {"plan": None}),
    ("gpu-memory", run("guards", memory_plan="off"), plan(total=140 << 30)),
    ("memory-not-checked", cluster(gpus_per_node=None), {"plan": None}),
    ("secret-in-env", env(HF_HUB_DISABLE_IMPLICIT_TOKEN="1", TOKENIZERS_PARALLELISM="false"), {}),
    ("secret-in-env", trainer(env=[{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]), {}),
    ("secret-in-command", cluster(command=["python", "t.py", "--token", "$(HF_TOKEN)", "--max-tokens", "4096"]), {}),
    ("secret-in-metadata", cluster(annotations={"example.com/team": "tokens"}), {}),
    ("secret-in-index-url", cluster(pip_index_url="https://index.example/simple"), {}),
    ("unset-reference", run("model", model_name_or_path="${MODEL:-/models/llama}"), {}),
    ("unset-reference", {**run("model", model_name_or_path="${MODEL}"), **env(MODEL="/models/llama")}, {}),
    ("unset-reference", {**run("model", revision="${MODEL}"), **cluster(secret_env={"MODEL": "a/b"})}, {}),
    ("nccl-unknown", env(NCCL_SHARP_DISABLE="1", NCCL_DEBUG="INFO", TORCH_NCCL_BLOCKING_WAIT="1"), {}),
    ("nccl-no-effect", env(NCCL_SOCKET_NTHREADS="4"), {}),
    ("nccl-no-effect", cluster(rdma="roce", env={"NCCL_IB_SPLIT_DATA_ON_QPS": "1", "NCCL_IB_QPS_PER_CONNECTION": "4"}), {}),
    ("nccl-default", env(NCCL_IB_DISABLE="1"), {}),
    ("nccl-tcp", env(NCCL_IB_DISABLE="1"), {}),
    ("nccl-interface", env(NCCL_SOCKET_IFNAME="^lo,docker"), {}),
    ("two-allocators", env(PYTORCH_ALLOC_CONF="expandable_segments:True"), {}),
    ("reserved-variable", cluster(nodes=3), {}),  # what we set ourselves
    ("rdma-without-nic", cluster(rdma="roce", extended_resources={"example.com/nic": "1"}), {}),
    ("rdma-without-nic", {"cluster": {**overlay(hostNetwork=True)["cluster"], "rdma": "infiniband"}}, {}),
    ("rdma-memlock", cluster(rdma="roce", run_as_uid=0, capabilities=["IPC_LOCK"]), {}),
    ("nic-without-rdma", cluster(extended_resources={"example.com/fpga": "1"}), {}),
    ("ipc-lock", cluster(capabilities=["IPC_LOCK"], run_as_uid=0), {}),
    ("capability", cluster(capabilities=["NET_BIND_SERVICE"]), {}),
    ("fixed-uid", cluster(run_as_uid=2000), to("slurm")),
    ("script-not-mounted", {}, script("train.py", working_dir="/code", volumes="[{claim: c, path: /code}]")),
    ("script-not-mounted", {}, script("/code/train.py", volumes="[{claim: c, path: /code}]")),
    ("script-not-mounted", {}, script("-m", "package.train")),
    ("script-not-here", {}, {**script(__file__), **to("slurm")}),
    ("memory-not-checked", {}, script("train.py", gpus_per_node="8")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "changes", "more"), QUIET, ids=[f"{index}-{row[0]}" for index, row in enumerate(QUIET)]
)
def test_what_is_right_is_not_reported(
    tmp_path: Path, rule: str, changes: dict[str, Any], more: dict[str, Any]
) -> None:
    findings = lint_of(tmp_path, changes, **{"plan": PLAN, **more})
    assert [one for one in findings if one.rule == rule] == []


@pytest.mark.parametrize(
    ("target", "nodes", "longest", "made"),
    [
        ("trainjob", 10, 48, "-node-0-9-abcde"),
        ("trainjob", 100, 47, "-node-0-99-abcde"),
        ("jobset", 10, 48, "-node-0-9-abcde"),
        ("pytorchjob", 2, 54, "-worker-0"),
        ("pytorchjob", 12, 53, "-worker-10"),
        ("job", 10, 61, "-9"),
    ],
)
def test_a_name_is_as_long_as_what_the_controller_makes_of_it_allows(
    tmp_path: Path, target: str, nodes: int, longest: int, made: str
) -> None:
    job = job_of(tmp_path, cluster(nodes=nodes))

    def findings(length: int) -> list[str]:
        named = replace(job, name="a" * length)
        return [
            one.what + one.fix for one in lint_of(tmp_path, {}, target=target, job=named) if one.rule == "name-length"
        ]

    assert findings(longest) == []
    (text,) = findings(longest + 1)
    assert made in text and f"at most {min(longest, 40)} characters" in text


def test_a_jobset_with_a_coordinator_has_its_name_twice_in_a_label(tmp_path: Path) -> None:
    job = job_of(tmp_path, cluster(nodes=2))
    template = render_job(job).templates["node"]
    workload = {"kind": "JobSet", "metadata": {"name": "x"}, "spec": {"coordinator": {"replicatedJob": "node"}}}
    for length, reported in ((26, 0), (27, 1)):
        findings = lint(replace(job, name="a" * length), Manifests(workload, (), {"node": template}), None, "jobset")
        assert sum(one.rule == "name-length" for one in findings) == reported


def test_no_finding_repeats_a_secret(tmp_path: Path) -> None:
    secrets = {"plain": "s3cr3tvalue", "token": TOKEN}
    changes = {
        "model": {"revision": TOKEN},
        "cluster": {
            "env": {"MY_API_KEY": "s3cr3tvalue", "X": TOKEN},
            "secret_env": {"PASSWORD": "s3cr3tvalue"},
            "annotations": {"a": TOKEN},
            "pip_index_url": f"https://ana:{TOKEN}@index.example/simple",
            "pod_overlay": {"spec": {"containers": [{"name": "trainer", "args": ["--password", "s3cr3tvalue"]}]}},
        },
    }
    findings = lint_of(tmp_path, changes)
    assert len([one for one in findings if one.rule.startswith("secret-")]) >= 7
    for secret in secrets.values():
        assert not any(secret in f"{one.path} {one.what} {one.fix}" for one in findings)


def test_errors_come_first_and_pods_that_are_alike_are_reported_once(tmp_path: Path) -> None:
    job = job_of(tmp_path, cluster(nodes=2, memory="96GB", image="a:1", env={"NCCL_IB_DISABLE": "0"}))
    rendered = render_job(job)
    template = rendered.templates["node"]
    spec = {"Master": {"template": template}, "Worker": {"template": template}}
    workload = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "x"},
        "spec": {"pytorchReplicaSpecs": spec},
    }
    findings = lint(job, Manifests(workload, (), {"master": template, "worker": template}), None, "pytorchjob")
    severities = [one.severity for one in findings]
    assert severities == sorted(severities, key=["error", "warning", "notice"].index)
    assert len(findings) == len({(one.rule, one.what) for one in findings})
    paths = [
        one.path
        for one in lint(
            job_of(tmp_path, overlay(hostPID=True)), Manifests(workload, (), {"master": template}), None, "pytorchjob"
        )
    ]
    assert all(path.startswith(("cluster.", "train.", "spec.pytorchReplicaSpecs.Master.template")) for path in paths), (
        paths
    )


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"spec": {"containers": {"trainer": {}}}}, "pod_overlay.spec.containers is not a list of mappings that each have `name`"),
        ({"spec": {"containers": [{"image": "x"}]}}, "each have `name`"),
        ({"spec": {"containers": [{"name": "trainer", "env": {"A": "b"}}]}}, "pod_overlay.spec.containers[0].env is not a list"),
        ({"spec": ["hostNetwork"]}, "pod_overlay.spec is not a mapping"),
        ({"containers": []}, "pod_overlay.containers is no part of a pod template (metadata, spec)"),
    ],
)  # fmt: skip
def test_an_overlay_that_is_no_pod_template_is_refused(tmp_path: Path, broken: dict[str, Any], words: str) -> None:
    with pytest.raises(UserInputError) as error:
        render_job(job_of(tmp_path, {"cluster": {**GOOD["cluster"], "pod_overlay": broken}}))
    assert words in error.value.what


def test_the_example_config_has_no_errors() -> None:
    file = REPOSITORY / "configs" / "two-nodes-on-a-cluster.yaml"
    job = make_job(load_config(file, environ={}), file)
    assert [one for one in lint(job, None, None, "jobset") if one.severity == "error"] == []


@pytest.mark.parametrize("kind", sorted(RENDERERS))
def test_a_good_job_of_two_nodes_has_no_errors_whatever_the_kind(tmp_path: Path, kind: str) -> None:
    job = job_of(tmp_path, cluster(nodes=2))
    assert [one for one in lint(job, RENDERERS[kind](job), PLAN, kind) if one.severity == "error"] == []


@pytest.mark.parametrize("kind", sorted(RENDERERS))
def test_variables_that_an_overlay_removes_are_those_of_the_kind(tmp_path: Path, kind: str) -> None:
    job = job_of(tmp_path, raw_overlay(spec={"containers": [{"name": "trainer", "env": None}]}))
    (found,) = [one for one in lint(job, RENDERERS[kind](job), PLAN, kind) if one.rule == "removed-variable"]
    assert "SHARDTUNE_NODES" in found.what and "SHARDTUNE_SECRET" in found.what
    assert ("MASTER_ADDR" in found.what) == (kind in ("job", "jobset"))  # the others' controllers set it


def test_a_missing_package_is_one_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "_has", lambda package: False)
    schemas._kubernetes_version.cache_clear()
    (found,) = lint_of(tmp_path, {}, plan=PLAN)
    assert (found.rule, found.severity) == ("schema-not-checked", "notice")
    assert "kubernetes-validate is not installed" in found.what and "shardtune[cluster]" in found.fix
    job = job_of(tmp_path, {})
    with pytest.raises(UserInputError, match="kubernetes-validate is not installed"):  # nothing is sent unchecked
        check_before_sending(Console(), job, render_job(job), PLAN, "job")


def test_a_schema_finding_does_not_repeat_what_may_be_a_secret(tmp_path: Path) -> None:
    changes = trainer(env=[{"name": "API_KEY", "value": 918273}], args="--password s3cr3tvalue")
    texts = [f"{one.what} {one.fix}" for one in lint_of(tmp_path, changes) if one.rule == "schema"]
    assert len(texts) == 2 and not any("918273" in text or "s3cr3tvalue" in text for text in texts)


def test_one_wrong_quantity_is_one_error(tmp_path: Path) -> None:
    assert [one.rule for one in lint_of(tmp_path, cluster(memory="96GB"), plan=PLAN)] == ["quantity"]


def test_an_unknown_variable_is_reported_once(tmp_path: Path) -> None:
    assert [one.rule for one in lint_of(tmp_path, env(NCCL_IB_DISABEL="1"), plan=PLAN)] == ["nccl-unknown"]


def test_a_remedy_names_only_what_can_be_written(tmp_path: Path) -> None:
    relative = lint_of(tmp_path, cluster(volumes=[{"claim": "m", "path": "models"}]))
    (kept,) = [one for one in relative if one.rule == "output-not-kept"]
    assert "such as" not in kept.fix
    without = lint_of(tmp_path, raw_overlay(spec={"volumes": None}))
    fixes = {one.fix for one in without if one.rule == "mount-without-volume"}
    assert len(fixes) == 1 and fixes.pop().endswith("; the pod has none.")


def test_a_job_without_gpus_is_not_told_about_them(tmp_path: Path) -> None:
    changes = {**cluster(gpus_per_node=None, nodes=3, cpu=None), **run("parallel", device="cpu")}
    findings = {one.rule: one for one in lint_of(tmp_path, changes)}
    for rule in ("gang", "missing-cpu"):
        assert "GPU" not in f"{findings[rule].what} {findings[rule].fix}"


def test_hidden_notices_are_not_counted(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    job = job_of(tmp_path, cluster(nodes=2, cpu=None))
    check_before_sending(console, job, render_job(job), PLAN, "job")
    assert console.file.getvalue().splitlines()[-1].split(maxsplit=1)[1] == "0 errors, 1 warning"
    check_before_sending(console, job, render_job(job), PLAN, "job", notices=True)
    assert console.file.getvalue().splitlines()[-1].endswith("0 errors, 1 warning, 2 notices")


def test_the_page_of_rules_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "cluster-lint.md").read_text(encoding="utf-8") == rules_page(), (
        "python -m shardtune.cluster.lint_page > docs/cluster-lint.md"
    )
