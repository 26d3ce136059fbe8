"""What does a job for a scheduler need? The section `cluster`, the same for Run:ai, Kubeflow, JobSet and Slurm.

`shardtune train` reads none of it. Words of Kubernetes keep their meaning; docs/cluster.md shows what each becomes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shardtune.config.fields import Float, Int, Section, comma_list

Target = Literal["runai", "trainjob", "pytorchjob", "jobset", "job", "slurm", "docker", "podman", "local-pods"]
Kind = Literal["pytorchjob", "jobset", "trainjob", "job"]
Names = Annotated[list[str], BeforeValidator(comma_list)]


def _quantity(value: Any) -> Any:
    # `memory: 3846` is a number to YAML; lint has to see it, because every API server takes it as bytes.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[str, BeforeValidator(_quantity)]


class VolumeSection(Section):
    """A PersistentVolumeClaim that the job mounts."""

    claim: str = Field(min_length=1, description="Name of the PersistentVolumeClaim; it must exist.")
    path: str = Field(min_length=1, description="Where it is mounted in the container (absolute).")
    sub_path: str | None = Field(default=None, description="Mount this folder of the volume only.")
    read_only: bool = Field(default=False, description="Mount it read-only.")


class ClusterSection(Section):
    """The job for a scheduler: `shardtune submit` reads it, `train` does not."""

    target: Target | None = Field(
        default=None,
        description="Where `shardtune submit` sends the job (also --to). `job` = an Indexed Job of Kubernetes alone; "
        "`docker`, `podman` = one container on this machine; `local-pods` = the rendered pods as processes here.",
    )
    profile: str | None = Field(
        default=None,
        description="A site's settings from ~/.config/shardtune/clusters.yaml, under what is set here.",
    )
    context: str | None = Field(default=None, description="Context of the kubeconfig; null = the current one.")
    namespace: str | None = Field(
        default=None, description="Kubernetes namespace; null = the context's. For Run:ai, runai-PROJECT."
    )
    job_name: str | None = Field(
        default=None,
        description="Name of the job, and id of its run; null = the name of the config file (or the script) and four "
        "characters.",
    )
    nodes: Int = Field(
        default=1,
        ge=1,
        description="Number of machines (pods). Scaling changes only this; train.effective_batch_size, if set, must be "
        "divisible by the number of processes on all nodes.",
    )
    gpus_per_node: Int | None = Field(
        default=None, ge=0, description="GPUs of each node; one process is started per GPU."
    )
    gpu: str | None = Field(
        default=None,
        description="Which GPU the nodes have (H200, A100-80GB, …; docs/plan.md), to check the memory first.",
    )
    gpu_resource: str = Field(default="nvidia.com/gpu", min_length=1, description="Resource name of a GPU.")
    image: str | None = Field(default=None, description="Container image, preferably with its digest (@sha256:…).")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When nodes pull the image; null = the cluster's default."
    )
    image_pull_secrets: Names = Field(default_factory=list, description="Secrets for a private registry, by name.")
    cpu: Quantity | None = Field(default=None, description="CPU cores requested per node, e.g. 16 or 500m.")
    cpu_limit: Quantity | None = Field(
        default=None, description="CPU limit; null = none, because a limit throttles the processes that feed the GPUs."
    )
    memory: Quantity | None = Field(
        default=None, description="Host memory requested per node, with a unit, e.g. 256Gi (a number alone is bytes)."
    )
    memory_limit: Quantity | None = Field(default=None, description="Host memory limit per node; null = memory.")
    ephemeral_storage: Quantity | None = Field(
        default=None, description="Disk of the node requested for the container's own files, e.g. 50Gi."
    )
    shared_memory: Quantity = Field(
        default="auto",
        description="Size of /dev/shm (a tmpfs that counts as memory). `auto` = what the plan needs, at least 1Gi and "
        "at most half of memory.",
    )
    extended_resources: dict[str, Quantity] = Field(
        default_factory=dict,
        description="Other resources per node, such as the RDMA NIC under the site's name.",
        examples=[{"openshift.io/mellanoxnics": "1"}],
    )
    rdma: Literal["none", "infiniband", "roce"] = Field(
        default="none",
        description="The network between nodes. With RDMA, NCCL_NET=IB makes a fall-back to TCP an error instead of a "
        "slow run.",
    )
    networks: Names = Field(
        default_factory=list, description="Secondary networks of the pods (annotation k8s.v1.cni.cncf.io/networks)."
    )
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations of the pods.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels of the job and its pods.")
    volumes: list[VolumeSection] = Field(
        default_factory=list,
        description="PersistentVolumeClaims to mount. Model, data and train.output_dir are paths inside the container.",
        examples=[[{"claim": "models", "path": "/models", "read_only": True}, {"claim": "runs", "path": "/runs"}]],
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the job. Secrets belong in secret_env."
    )
    secret_env: dict[str, str] = Field(
        default_factory=dict,
        description="Variables from Secrets that exist in the namespace, as SECRET/KEY: names only, never values.",
        examples=[{"HF_TOKEN": "hub/token"}],
    )
    env_from_secrets: Names = Field(
        default_factory=list, description="Secrets whose every key becomes an environment variable, by name."
    )
    pip_index_url: str | None = Field(
        default=None,
        description="Package index for commands that install in the container (PIP_INDEX_URL, UV_DEFAULT_INDEX).",
    )
    service_account: str | None = Field(default=None, description="ServiceAccount of the pods.")
    run_as_uid: Int | None = Field(
        default=None, ge=0, description="User id of the processes; null leaves it to the cluster (OpenShift: random)."
    )
    run_as_gid: Int | None = Field(default=None, ge=0, description="Group id of the processes.")
    fs_group: Int | None = Field(default=None, ge=0, description="Group that owns the mounted volumes.")
    capabilities: Names = Field(default_factory=list, description="Linux capabilities to add, such as IPC_LOCK.")
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels that a node must have.")
    tolerations: list[dict[str, Any]] = Field(
        default_factory=list, description="Taints that the pods tolerate, as Kubernetes writes them."
    )
    affinity: dict[str, Any] = Field(default_factory=dict, description="Affinity of the pods, as Kubernetes writes it.")
    topology_spread: list[dict[str, Any]] = Field(
        default_factory=list, description="topologySpreadConstraints of the pods, as Kubernetes writes them."
    )
    topology: str | None = Field(
        default=None,
        description="Node label within whose one value all pods must be placed, such as a rack or a block (Kueue's "
        "topology-aware scheduling; needs queue).",
    )
    priority_class: str | None = Field(default=None, description="PriorityClass of the pods.")
    queue: str | None = Field(default=None, description="Kueue's LocalQueue that admits the job.")
    gang_scheduling: Literal["none", "coscheduling", "volcano"] = Field(
        default="none",
        description="Start all pods or none: the scheduler that does it. Kueue and Run:ai do it by themselves.",
    )
    scheduler_name: str | None = Field(
        default=None, description="schedulerName of the pods; null = the cluster's default."
    )
    restarts: Int = Field(
        default=3,
        ge=0,
        description="How often the scheduler restarts the job's pods after a failure; the run resumes from its "
        "checkpoint. Invalid input (exit 2) is not restarted where the kind can tell.",
    )
    grace_seconds: Annotated[Int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Seconds from SIGTERM to SIGKILL. `auto` = time for a step and a save by the plan, at least 120; "
        "600 without a plan.",
    )
    max_hours: Float | None = Field(default=None, gt=0, description="End the job after this many hours; null = never.")
    keep_hours: Float | None = Field(
        default=None, ge=0, description="Delete the job (not its files) this many hours after it ended; null = keep."
    )
    working_dir: str | None = Field(
        default=None, description="Working directory in the container; null = the image's. Relative paths start here."
    )
    command: list[str] = Field(
        default_factory=list,
        description="Command of the container, one word per item; default: shardtune train with this config.",
    )
    init_doctor: bool = Field(
        default=False,
        description="Run `shardtune doctor` in an init container: a node that is not fit fails before it trains.",
    )
    pod_overlay: dict[str, Any] = Field(
        default_factory=dict,
        description="Merged last into the pod template (metadata, spec), for what no setting covers. Lists of named "
        "things (containers, volumes, env) are merged by name; the container is called `trainer`.",
    )
    trainer_release: Literal["auto", "2.0", "2.1", "2.2", "2.3"] = Field(
        default="auto",
        description="Release of Kubeflow Trainer, whose TrainJob has other fields in each. `auto` = read from the "
        "cluster's CRD; without a cluster, 2.3.",
    )
    runai_project: str | None = Field(default=None, description="Run:ai project.")
    runai_submit: Literal["manifest", "cli", "cli-2.20"] = Field(
        default="manifest",
        description="How a job reaches Run:ai: a Kubernetes manifest for its scheduler, or the command `runai training "
        "pytorch submit` of today's CLI, or of release 2.20.",
    )
    runai_kind: Kind = Field(default="pytorchjob", description="Kind of the manifest for Run:ai.")
    sbatch: dict[str, Quantity] = Field(
        default_factory=dict,
        description="Options of sbatch for Slurm, without the dashes.",
        examples=[{"partition": "gpu", "time": "24:00:00", "account": "ml"}],
    )
