"""What does an error mean, and what usually causes it? By the code at the end of a message, or by a library's words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardtune.run.exit_codes import FAILED, LOST, NO_PROGRESS, OUT_OF_MEMORY, WRONG_INPUT

# What gloo, NCCL and the store raise on a rank when another one is gone.
PEER_LOST_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "connection timed out",
    "broken pipe",
    "gloo/transport",
    "socket timeout",
    "timed out waiting",
    "wait timeout after",
    "remote process exited",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "ncclsystemerror",
    "ncclinternalerror",
    "watchdog caught collective operation timeout",
    "sendbytes failed",
    "failed to recv",
    "no route to host",
    "network is unreachable",
)


@dataclass(frozen=True)
class ErrorCode:
    """One kind of failure.

    Args:
        exit_code: Of the run; None where it depends (128 + signal).
        page: Where docs/ says more.
        messages: Regular expressions for what libraries print in this case, case-insensitive.
    """

    code: str
    meaning: str
    causes: tuple[str, ...]
    fixes: tuple[str, ...]
    exit_code: int | None
    page: str
    messages: tuple[str, ...] = ()


# Messages are compared from the top: the specific before the general.
ERROR_CODES: tuple[ErrorCode, ...] = (
    ErrorCode(
        "out-of-memory",
        "A GPU had too little free memory for an allocation. The same config would fail again at the same place.",
        (
            "The micro-batch or data.max_length is too large for the activations that are kept.",
            "Another process uses memory of the same GPU.",
            "Memory is reserved but fragmented (long rows of changing length).",
        ),
        (
            "Make the first change that the message lists: it estimates what each one frees.",
            "`shardtune plan CONFIG --gpus …` shows what fits before anything is loaded.",
            "nvidia-smi shows other processes on the GPU.",
        ),
        OUT_OF_MEMORY,
        "out-of-memory.md",
        (
            r"cuda out of memory", r"outofmemoryerror", r"cublas_status_alloc_failed", r"cudaerrormemoryallocation",
            r"cuda error: out of memory", r"ran out of gpu memory",
        ),
    ),
    ErrorCode(
        "does-not-fit",
        "By the memory plan, the run needs more memory than the GPUs or the host have. Nothing was loaded.",
        (
            "The model, micro-batch or data.max_length is too large for these GPUs.",
            "A setting that saves memory is turned off (gradient_checkpointing: none, shard: replicate).",
        ),
        (
            "Use one of the settings that the message lists, or set them to auto.",
            "`shardtune plan CONFIG --compare` shows alternatives, the fastest that fits first.",
        ),
        WRONG_INPUT,
        "out-of-memory.md",
    ),
    ErrorCode(
        "duplicate-gpu",
        "Two ranks use the same GPU, which NCCL refuses.",
        (
            "More processes than GPUs (parallel.nproc, --nproc).",
            "CUDA_VISIBLE_DEVICES lists a GPU twice, or every process of another launcher sees the same single GPU.",
            "Two containers share one GPU.",
        ),
        (
            "Set parallel.nproc: auto (one process per GPU); `shardtune env` lists the GPUs that are visible.",
            "Give each process its own GPU: check CUDA_VISIBLE_DEVICES and the scheduler's request.",
        ),
        FAILED,
        "multi-node.md",
        (r"duplicate gpu detected", r"ncclinvalidusage"),
    ),
    ErrorCode(
        "shared-memory-full",
        "/dev/shm is too small. NCCL and data workers exchange data through it.",
        (
            "A container has 64 MB of it unless told otherwise.",
            "Many data workers (train.dataloader_num_workers) on one node.",
        ),
        (
            "Docker: --shm-size=16g or --ipc=host. Kubernetes: an emptyDir with medium: Memory mounted at /dev/shm.",
            "Lower train.dataloader_num_workers.",
        ),
        FAILED,
        "multi-node.md",
        (
            r"/dev/shm", r"insufficient shared memory", r"out of shared memory", r"unable to .*shared memory",
            r"\bbus error\b", r"sigbus",
        ),
    ),
    ErrorCode(
        "disk-full",
        "Files could not be written. Training continues without them; only an adapter that cannot be written "
        "anywhere ends the run.",
        ("The disk of train.output_dir is full, over its quota, read-only or gone.",),
        (
            "Free space, then run the same command again: it resumes from the last checkpoint.",
            "Set train.fallback_dir to a folder on another disk; lower train.save_total_limit.",
        ),
        FAILED,
        "failures.md",
        (r"no space left on device", r"disk quota exceeded", r"read-only file system"),
    ),
    ErrorCode(
        "permission-denied",
        "The user of this process may not read or write a file or folder.",
        (
            "A volume belongs to another user or group: OpenShift runs pods as an arbitrary user id in group 0.",
            "A run folder of another user: it is private unless train.run_folder_access is group.",
            "A cache lies in a home folder that this user cannot write (HF_HOME, data.cache_dir).",
        ),
        (
            "Let the group write the volume's folder (chgrp -R 0 and chmod -R g=u on OpenShift), or set "
            "cluster.fs_group where the cluster allows it.",
            "Set train.output_dir, data.cache_dir and HF_HOME to folders that this user can write.",
            "`shardtune doctor CONFIG`, run as that user, checks that the output folder can be written.",
        ),
        WRONG_INPUT,
        "openshift-runai.md",
        (r"permissionerror", r"errno 13\]", r"\berrno 13\b.*permission denied"),
    ),
    ErrorCode(
        "hub-access",
        "The Hub refused a model or dataset: it is gated or private, or does not exist under this name.",
        (
            "No token is set, or it is invalid or has expired.",
            "The model's licence was not accepted on its page with the account of this token.",
            "A misspelt name, or a local folder that does not exist and was taken for a Hub name.",
        ),
        (
            "Accept the licence on the model's page, then set HF_TOKEN or log in with hf auth login.",
            "In a cluster job, pass HF_TOKEN as a secret (cluster.secret_env), or put the model on a volume.",
            "Begin the path of a local folder with / or ./.",
        ),
        WRONG_INPUT,
        "air-gapped.md",
        (
            r"gated repo", r"gatedrepoerror", r"repositorynotfounderror", r"repository not found for url",
            r"401 client error(?!.*https?://(?!huggingface\.co))",
        ),
    ),
    ErrorCode(
        "unknown-architecture",
        "The installed transformers does not know the architecture of this model.",
        ("It is older than the model, often because a container image brings it.",),
        (
            "Install a newer transformers, or use an image that has it; `shardtune doctor CONFIG` checks it (`model "
            "class`) before anything is loaded.",
        ),
        WRONG_INPUT,
        "families.md",
        (
            r"does not recognize this architecture", r"cannot import name '\w+' from 'transformers",
            r"keyerror: '(?:cohere|deepseek|falcon|gemma|glm|gpt_oss|granite|lfm|llama|ministral|mistral|mixtral|olmo|"
            r"phi|qwen|smollm)\w*'",
        ),
    ),
    ErrorCode(
        "target-not-found",
        "The model has no modules with the names in lora.target_modules.",
        ("The names are those of another architecture: models with MLA attention have no q_proj, for example.",),
        (
            "Use words instead of names: target_modules: [attention, mlp], or all-linear.",
            "`shardtune plan CONFIG` lists the model's linear layers where a target matches none.",
        ),
        WRONG_INPUT,
        "targets.md",
        (r"target modules .*not found in the base model",),
    ),
    ErrorCode(
        "port-in-use",
        "The master's port is taken on node 0.",
        (
            "An earlier run has not ended, or another job runs on the same machine.",
            "Several jobs on one machine use the default port 29500.",
        ),
        ("Choose another --master-port (MASTER_PORT) on all nodes.", "`ss -ltnp` shows who listens on the port."),
        WRONG_INPUT,
        "multi-node.md",
        (r"address already in use", r"eaddrinuse"),
    ),
    ErrorCode(
        "no-progress",
        "A rank made no progress within its deadline, and the run was ended. The message names the rank, what it was "
        "doing, and the file with its stack.",
        (
            "A data source, file system or callback hangs.",
            "A rank was stopped (SIGSTOP, a debugger, a frozen container).",
            "A first step that compiles kernels takes longer than parallel.step_timeout_minutes.",
            "Ranks wait in a collective because the network between them does not work.",
        ),
        (
            "Look at the stack in crash/rank-N.txt of that rank.",
            "Raise parallel.step_timeout_minutes, load_timeout_minutes or checkpoint_timeout_minutes if it was merely "
            "slow.",
            "Run the same command again: it resumes from the last checkpoint (--max-restarts does so by itself).",
        ),
        NO_PROGRESS,
        "failures.md",
        (r"watchdog caught collective operation timeout", r"collective operation timeout", r"nccl timeout"),
    ),
    ErrorCode(
        "tokenizer-fork",
        "The process was forked after its tokenizer had started threads, which do not survive a fork. The tokenizers "
        "library warns and turns its threads off, or a data worker hangs.",
        (
            "TOKENIZERS_PARALLELISM is true in the environment: shardtune sets it to false unless it is set.",
            "A script that uses a tokenizer before its DataLoader starts workers.",
        ),
        (
            "Unset TOKENIZERS_PARALLELISM, or set it to false.",
            "In a script, tokenise before training, or set num_workers=0.",
        ),
        NO_PROGRESS,
        "troubleshooting.md",
        (r"process just got forked",),
    ),
    ErrorCode(
        "rank-killed",
        "A rank's process was ended by a signal. SIGKILL (137) is usually the kernel, because the host or the "
        "container ran out of memory.",
        (
            "Host memory: data workers, offloaded parameters or activations, several processes on one node.",
            "The scheduler or a person killed it.",
            "SIGSEGV (139) and SIGABRT (134): a crash in a library.",
        ),
        (
            "Give the job more memory, or use fewer data workers or processes.",
            "dmesg or the scheduler's log says who killed it.",
        ),
        None,
        "out-of-memory.md",
        (r"sigkill", r"signal 9\b", r"exitcode:? *-9\b", r"oomkilled", r"oom-kill", r"out of memory: killed process"),
    ),
    ErrorCode(
        "node-lost",
        "A node, or the master, stopped responding.",
        (
            "The machine, its network or its launcher is down.",
            "The scheduler has preempted or deleted the pod.",
        ),
        (
            "Check that machine; run the same command again on all nodes.",
            "parallel.node_timeout_seconds sets how long a node may be unresponsive; --max-restarts restarts the run.",
        ),
        LOST,
        "failures.md",
        (r"lost the connection to the master", r"stopped responding"),
    ),
    ErrorCode(
        "node-missing",
        "Not all nodes joined within parallel.join_timeout_minutes. Nothing was started.",
        (
            "A node was not started, or with another --nnodes, --master-addr or --master-port.",
            "A firewall blocks the master's port, or its name resolves differently on a node.",
            "Another program listens on that port.",
        ),
        (
            "Start the same command on every node, each with its own --node-rank.",
            "Check from the missing node that the master's port can be reached.",
        ),
        WRONG_INPUT,
        "multi-node.md",
        (r"could not connect to the master", r"did not join within", r"the client socket has timed out"),
    ),
    ErrorCode(
        "nodes-differ",
        "Nodes or ranks have different packages, settings or data from the rest, so their results would differ.",
        (
            "Different images, config files or environment variables.",
            "Other data files on a node, or two nodes with the same --node-rank.",
        ),
        ("Use one image, one config file and the same data on all nodes; the message names what differs.",),
        WRONG_INPUT,
        "multi-node.md",
        (r"do not run the same thing", r"do not have the same packages", r"prepared different data"),
    ),
    ErrorCode(
        "loss-nan",
        "The loss, a gradient or the validation loss is NaN or infinite. It never reached the weights: earlier "
        "checkpoints are usable.",
        (
            "The learning rate is too high, or the warm-up too short.",
            "Rows with unusual content; the message lists them.",
            "NaN in the base model's weights: the message then names the tensor.",
        ),
        (
            "Lower train.learning_rate or raise train.warmup_ratio.",
            "Look at the rows: `shardtune data inspect CONFIG --show 3`.",
            "guards.non_finite: skip-step or rollback continues without these rows.",
        ),
        FAILED,
        "guards.md",
        (r"loss is (nan|inf)", r"\bnan loss\b", r"loss.{0,20}\bnan\b"),
    ),
    ErrorCode(
        "guard-stop",
        "A guard whose action is `stop` (or whose limit of skipped steps or rollbacks is reached) ended the run.",
        ("What the guard detected; the message names it and its setting, guards.<name>.",),
        ("Change what the message suggests, or the guard's action (warn, rollback) and threshold.",),
        FAILED,
        "guards.md",
    ),
    ErrorCode(
        "replicas-differ",
        "Ranks that must hold the same weights do not (compared by checksum).",
        (
            "A bit flipped in the memory of a GPU or host.",
            "A damaged file, or another version of the model, on one node.",
        ),
        (
            "Check that machine's memory (nvidia-smi -q -d ECC), and leave it out if it happens again.",
            "Copy the model's files again if the message blames a file.",
        ),
        FAILED,
        "guards.md",
        (r"replicas differ",),
    ),
    ErrorCode(
        "data-changed",
        "The run cannot resume: the same settings now give different rows, so that its position in the data is "
        "meaningless.",
        ("A data file, the tokenizer or its chat template was changed or replaced.",),
        ("Restore the files, or start a new run: --resume never.",),
        WRONG_INPUT,
        "checkpoints.md",
    ),
    ErrorCode(
        "cannot-resume",
        "The config was changed and no longer matches the checkpoint's run.",
        ("Settings that decide the model, the adapters, the data or the effective batch differ.",),
        (
            "Revert the changes that the message lists, or start a new run: --resume never.",
            "`shardtune explain KEY` says of each setting whether it may change.",
        ),
        WRONG_INPUT,
        "checkpoints.md",
    ),
    ErrorCode(
        "nccl-error",
        "NCCL, the GPUs' communication library, could not use the system or the network.",
        (
            "NCCL_SOCKET_IFNAME or NCCL_IB_HCA names an interface that a node does not have.",
            "Limits of the container: memlock for InfiniBand, /dev/shm.",
            "A network link or a node went down; then another rank has the cause.",
        ),
        (
            "Run again with NCCL_DEBUG=WARN: the line before the error names the call that failed.",
            "`shardtune doctor` checks this machine's networks, limits and NCCL variables.",
        ),
        FAILED,
        "multi-node.md",
        (r"unhandled system error", r"ncclsystemerror", r"ncclinternalerror", r"nccl error", r"net/ib"),
    ),
    ErrorCode(
        "cuda-build",
        "torch or another compiled package was not built for this GPU or for this version of CUDA.",
        (
            "The GPU is newer or older than those this build of torch has kernels for.",
            "A package (an attention or quantisation kernel, torchvision) was built for another major version of CUDA "
            "than torch's; it then looks for a libcudart that is not there.",
        ),
        (
            "Compare torch.cuda.get_arch_list() with torch.cuda.get_device_capability(), and install a build of torch "
            "for this GPU.",
            "Install the package for torch's CUDA (torch.version.cuda), or remove it if nothing needs it.",
        ),
        FAILED,
        "doctor.md",
        (r"no kernel image is available", r"libcudart[\w.-]*: cannot open shared object"),
    ),
    ErrorCode(
        "cuda-error",
        "A GPU or its driver failed, or a kernel accessed memory it must not. CUDA reports it late: the line of the "
        "traceback is often not the cause.",
        (
            "A hardware error of the GPU (uncorrectable ECC, fallen off the bus).",
            "The driver is older than this build of torch needs.",
            "Token ids outside of the embedding (a tokenizer of another model): device-side assert.",
        ),
        (
            "dmesg | grep Xid and nvidia-smi -q show hardware errors; leave that GPU out.",
            "Run once with CUDA_LAUNCH_BLOCKING=1 to see the operation, and with train.kernels: eager to rule out "
            "fused kernels.",
        ),
        FAILED,
        "failures.md",
        (
            r"cuda error", r"cudnn_status", r"cublas_status", r"device-side assert", r"illegal memory access",
            r"unhandled cuda error", r"uncorrectable ecc", r"driver version is insufficient", r"xid \d+",
        ),
    ),
    ErrorCode(
        "connection-lost",
        "The connection between ranks broke. On most ranks this only follows from what happened to another one.",
        ("Another rank or node ended: its message is the cause.", "The network between the nodes failed."),
        (
            "Read the message of the rank that failed first; crash/findings.json has those of all.",
            "If no rank reports another cause, check the network between the nodes.",
        ),
        LOST,
        "failures.md",
        tuple(map(re.escape, PEER_LOST_MESSAGES)),
    ),
)  # fmt: skip

BY_CODE: dict[str, ErrorCode] = {entry.code: entry for entry in ERROR_CODES}

# The codes of what a launcher finds about a rank or node that could not say it itself (findings.Finding.kind).
CODES_OF_KINDS: dict[str, str] = {
    "killed": "rank-killed",
    "stopped": "no-progress",
    "silent": "no-progress",
    "stalled": "no-progress",
    "waiting": "no-progress",
    "lost": "node-lost",
    "peer_lost": "connection-lost",
}


def code_of_message(text: str) -> str:
    """The code of an error message of ours or of a library; "" if it is none of these."""
    lowered = text.lower()
    return next((e.code for e in ERROR_CODES if any(re.search(message, lowered) for message in e.messages)), "")
