"""Which flags does Run:ai's command have, and which of them have no setting of ours?

Those of today's command (2.22 to 3.0), of release 2.20 and of the first generation (`runai submit-dist pytorch`).
"""

from __future__ import annotations

FORMS = (
    "training pytorch submit", "training submit", "training standard submit", "pytorch submit", "distributed submit",
    "submit-dist pytorch", "submit",
)  # fmt: skip
ONE_POD = ("training submit", "training standard submit", "submit")
SHORT = {
    "-p": "--project", "-i": "--image", "-g": "--gpu-devices-request", "-e": "--environment-variable",
    "-c": "--command", "-t": "--tty", "-v": "--volume", "-a": "--annotation", "-l": "--label", "-s": "--service-type",
    "-q": "--quiet", "-d": "--debug", "-f": "--framework",
}  # fmt: skip
OTHER_SPELLINGS = {
    "--gpu": "--gpu-devices-request", "--cpu": "--cpu-core-request", "--cpu-limit": "--cpu-core-limit",
    "--memory": "--cpu-memory-request", "--memory-limit": "--cpu-memory-limit", "--pvc-exists": "--existing-pvc",
    "--pvc-new": "--new-pvc", "--add-capability": "--capability", "--job-name-prefix": "--name-prefix",
    "--ttl-after-finish": "--auto-deletion-time-after-completion", "--configmap-volume": "--configmap-map-volume",
    "--node-pool": "--node-pools", "--master-environment": "--master-environment-variable",
    "--master-gpu": "--master-gpu-devices-request", "--node_type": "--node-type",
}  # fmt: skip
SWITCHES = frozenset(
    {"--allow-privilege-escalation", "--attach", "--command", "--create-home-dir", "--host-ipc", "--host-network",
     "--large-shm", "--master-no-pvcs", "--no-master", "--privileged", "--run-as-non-root", "--run-as-user", "--stdin",
     "--tty", "--debug", "--quiet", "--verbose", "--mount-propagation", "--interactive", "--preemptible"}
)  # fmt: skip
_OWN_MACHINE = "It is about the terminal that submits."
_RENDERED = "The rendered job sets it for every pod."
NO_EFFECT = {
    **dict.fromkeys(
        ("--attach", "--stdin", "--tty", "--debug", "--quiet", "--verbose", "--wait-for-submit", "--config-file",
         "--config-path", "--pod-running-timeout", "--loglevel"),
        _OWN_MACHINE,
    ),
    "--command": "It belongs to the command after `--`.",
    "--framework": "The job trains with PyTorch.",
    "--name-prefix": "The name is made from the config file's name and four characters.",
    "--restart-policy": _RENDERED, "--master-restart-policy": _RENDERED, "--clean-pod-policy": _RENDERED,
    "--run-as-non-root": "OpenShift demands it anyway; the image is not root.",
    "--create-home-dir": "The image has a writable home.",
    "--gpu-request-type": "GPUs are whole ones.",
    "--interactive": "A training job is none.",
}  # fmt: skip
ASSET = "Assets live in Run:ai's user interface and cannot be read here: write what it holds as settings of cluster."
WHOLE_GPUS = "Sharded training needs whole GPUs: set gpus_per_node."
_USE_CLAIM = "Make a PersistentVolumeClaim for it and name it in volumes."
NOT_SUPPORTED = {
    "--template": ASSET, "--compute": ASSET, "--datasource": ASSET, "--datavolume": ASSET,
    "--env-my-credentials": "Put the value into a Secret and name it in secret_env.",
    "--image-pull-my-credentials": "Name a Secret of the namespace in image_pull_secrets.",
    "--new-pvc": "Claims are not made by the job, which would delete them: create it first, then name it in volumes.",
    "--pvc": _USE_CLAIM, "--volume": _USE_CLAIM, "--s3": _USE_CLAIM,
    "--git-sync": "Code belongs into the image.",
    "--gpu-portion-request": WHOLE_GPUS, "--gpu-portion-limit": WHOLE_GPUS, "--gpu-memory-request": WHOLE_GPUS,
    "--gpu-memory-limit": WHOLE_GPUS, "--gpu-memory": WHOLE_GPUS, "--mig-profile": WHOLE_GPUS,
    "--min-replicas": "The number of nodes is fixed; a run resumes on another number when it is submitted again.",
    "--max-replicas": "The number of nodes is fixed; a run resumes on another number when it is submitted again.",
    "--port": "Training needs no open port.", "--external-url": "Training needs no open port.",
    "--service-type": "Training needs no open port.", "--address": "Training needs no open port.",
    "--allow-privilege-escalation": "Training does not need it.", "--privileged": "Training does not need it.",
    "--run-as-user": "Your own uid and groups: set run_as_uid and run_as_gid if files on a volume need them.",
    "--user-group-source": "Set run_as_uid and run_as_gid if files on a volume need them.",
    "--supplemental-groups": "Set fs_group if files on a volume need it.",
    "--seccomp-profile": "Write it into pod_overlay.spec.securityContext.",
    "--exclude-node": "Write it into affinity.",
    "--preferred-pod-topology-key": "Only a required placement is a setting: topology.",
    "--mount-propagation": "Training does not need it.",
    "--nfs-server": _USE_CLAIM,
    "--mnnvl": "Write its annotation into annotations.", "--category": "Only the UI shows it.",
}  # fmt: skip
