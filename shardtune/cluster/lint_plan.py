"""Does the job ask for as much as the plan says the run needs?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardtune.cluster.lint_finding import Finding, Rule, error, notice, warning
from shardtune.cluster.lint_resources import amount
from shardtune.cluster.quantity import mebibytes
from shardtune.cluster.spec import WRITE_RATE
from shardtune.config.batch import rows_per_process
from shardtune.config.schema import TrainSection
from shardtune.errors import UserInputError
from shardtune.terminal import size

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject
    from shardtune.plan.report import Plan

_BATCH = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")

RULES = (
    Rule(
        "batch-size",
        "error",
        "The job's processes cannot divide `train.effective_batch_size`, or the other batch settings contradict it.",
        "Every pod is refused at its start (exit code 2).",
    ),
    Rule(
        "gpu-memory",
        "error",
        "The run needs more GPU memory than the named GPU has (a warning with `guards.memory_plan: warn`, nothing"
        " with `off`).",
        "`train` refuses it, or it runs out of memory.",
    ),
    Rule(
        "host-memory",
        "error",
        "The plan's host memory and `/dev/shm` exceed the memory limit.",
        "The kernel kills a process (exit code 137) when it is reached.",
    ),
    Rule(
        "shm-plan",
        "error",
        "`/dev/shm` is smaller than data workers and NCCL need by the plan.",
        "Processes die of SIGBUS.",
    ),
    Rule(
        "memory-not-checked",
        "notice",
        "No GPU is named, or the model is not on this machine, so there is no plan.",
        "Whether it fits is found out on the cluster.",
    ),
)


def check_plan(subject: Subject) -> Iterator[Finding]:
    plan, settings = subject.plan, subject.settings
    yield from _check_batch(subject)
    if plan is None:
        if settings.gpus_per_node and subject.job.config is not None and subject.job.script is None:
            yield _not_checked(settings.gpu)
        return
    yield from _check_gpu_memory(subject, plan)
    need = plan.host
    limit = amount(settings.memory_limit or settings.memory or "")
    used = need.per_node + need.shm
    if limit is not None and used > limit:
        key = "cluster.memory_limit" if settings.memory_limit else "cluster.memory"
        given = settings.memory_limit or settings.memory
        what = f"a node needs {size(used)} by the plan ({size(need.shm)} of it in /dev/shm); the limit is {given}"
        yield error("host-memory", key, what, f"Set it to at least {mebibytes(1.2 * used)} (a fifth in reserve).")
    if subject.job.shared_memory < need.shm:
        what = (
            f"/dev/shm has {size(subject.job.shared_memory)}; data workers and NCCL need {size(need.shm)} by the plan"
        )
        yield error("shm-plan", "cluster.shared_memory", what, f"Set it to auto, or to {mebibytes(need.shm)}.")


def _check_batch(subject: Subject) -> Iterator[Finding]:
    """Arithmetic alone: it is known without the model, which often is on the cluster only."""
    given = {name: subject.run_values.get(f"train.{name}") for name in _BATCH}
    if not isinstance(given["effective_batch_size"], int):
        return
    known = {name: value for name, value in given.items() if isinstance(value, int) or value == "auto"}
    try:
        rows_per_process(TrainSection.model_validate(known), subject.settings.nodes * subject.job.nproc)
    except UserInputError as refused:
        yield error("batch-size", "train.effective_batch_size", refused.what.rstrip("."), refused.fix)


def stop_seconds(plan: Plan) -> float:
    """From SIGTERM until the run has saved: the step that was interrupted, and the checkpoint."""
    return plan.time.seconds + plan.host.checkpoint / WRITE_RATE


def _not_checked(gpu: str | None) -> Finding:
    if gpu is None:
        fix = "Set cluster.gpu (H200, A100-80GB, …; docs/plan.md)."
        return notice("memory-not-checked", "cluster.gpu", "GPU memory is not checked: no GPU is named", fix)
    what = "GPU memory is not checked: the model's files are not on this machine"
    fix = "Run `shardtune plan` where they are (config.json and the headers of the weights are enough)."
    return notice("memory-not-checked", "model.model_name_or_path", what, fix)


def _check_gpu_memory(subject: Subject, plan: Plan) -> Iterator[Finding]:
    # Of the plan itself the guard is always off: it says what does not fit instead of raising.
    guard = subject.run_values.get("guards.memory_plan", "refuse")
    if guard == "off" or plan.memory.total <= plan.usable:
        return
    report = error if guard == "refuse" else warning
    gpu = plan.cluster.gpu.name
    what = f"a GPU needs {size(plan.memory.total)} by the plan; {size(plan.usable)} of a {gpu} are usable"
    fix = "`shardtune plan CONFIG --compare` shows what fits: more GPUs or nodes, shorter rows, offloading."
    yield report("gpu-memory", "cluster.gpus_per_node", what, fix)
