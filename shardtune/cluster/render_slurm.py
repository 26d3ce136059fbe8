"""Which batch script runs the job under Slurm? One text: resources, run.yaml, the nodes' secret, srun, requeue.

The nodes see one file system, so the script writes run.yaml where it was submitted and every node reads it there. The
processes run in the environment of whoever called sbatch: an image would need a plug-in (pyxis, apptainer) with options
that differ from site to site, so `cluster.image` is refused and a command of the user's own can start the container.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator

from shardtune.cluster.pod import doctor_arguments
from shardtune.cluster.quantity import parse_quantity
from shardtune.cluster.spec import CONFIG_FILE, CONFIG_FOLDER, ClusterJob
from shardtune.cluster.unsupported import refuse_settings
from shardtune.errors import UserInputError
from shardtune.launch.network import SECRET_VARIABLE
from shardtune.run.exit_codes import DONE, INTERRUPTED, OUT_OF_MEMORY, PREEMPTED, WRONG_INPUT

_INSTALL = "install shardtune where the nodes see it (a virtual environment on the shared file system)"
_NOT_HERE = "remove it (a profile is the place for one cluster's settings)"
_REFUSED = {
    "image": f"{_INSTALL}, or write cluster.command with your site's container launcher",
    **dict.fromkeys(
        (
            "image_pull_policy", "image_pull_secrets", "namespace", "networks", "annotations", "labels",
            "extended_resources", "service_account", "run_as_uid", "run_as_gid", "fs_group", "capabilities",
            "tolerations", "affinity", "topology_spread", "scheduler_name", "pod_overlay", "keep_hours",
        ),
        _NOT_HERE,
    ),
    "volumes": "remove it; paths are those of the shared file system",
    "env_from_secrets": "name each variable in cluster.secret_env; its value comes from the environment of sbatch",
    "node_selector": "use cluster.sbatch with constraint, partition or nodelist",
    "topology": "use cluster.sbatch with switches",
    "priority_class": "use cluster.sbatch with qos",
    "queue": "use cluster.sbatch with partition",
    "gang_scheduling": "remove it; Slurm starts all nodes or none by itself",
    "gpu_resource": "remove it; use cluster.sbatch with gres",
    "shared_memory": "remove it (auto); /dev/shm is the node's",
    "cpu_limit": "remove it; cluster.cpu is both",
    "memory_limit": "remove it; cluster.memory is both",
}  # fmt: skip
_OURS = {
    "nodes": "cluster.nodes", "N": "cluster.nodes", "job-name": "cluster.job_name", "J": "cluster.job_name",
    "ntasks": "nothing", "n": "nothing", "ntasks-per-node": "nothing", "chdir": "cluster.working_dir",
    "D": "cluster.working_dir", "signal": "cluster.grace_seconds", "requeue": "cluster.restarts",
    "no-requeue": "cluster.restarts", "open-mode": "nothing", "wrap": "cluster.command",
}  # fmt: skip
_GPUS = ("gres", "gpus", "G", "gpus-per-node", "gpus-per-task")
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_CPUS = ("cpus-per-task", "c", "cpus-per-gpu")


def render_slurm(job: ClusterJob) -> str:
    """The script for `sbatch`.

    Raises:
        UserInputError: a setting that Slurm cannot express, or an option of sbatch that a setting stands for.
    """
    refuse_settings(job, "Slurm", _REFUSED if job.script is None else {**_REFUSED, "image": _INSTALL})
    _check_sbatch(job)
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_option(name, value)}" for name, value in _directives(job)]
    lines += ["", "set -u", ""]
    lines += _environment(job)
    lines += _write_config(job)
    lines += _doctor(job)
    lines += _step(job)
    lines += _finish(job)
    return "\n".join(lines) + "\n"


def _check_sbatch(job: ClusterJob) -> None:
    for name, value in job.settings.sbatch.items():
        if name in _OURS:
            instead = _OURS[name]
            raise UserInputError(
                f"cluster.sbatch has {name}, which the script sets itself.",
                fix="Remove it." if instead == "nothing" else f"Remove it; set {instead}.",
            )
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name) or "\n" in value:
            raise UserInputError(
                f"cluster.sbatch: '{name}' is not an option of sbatch.",
                fix="Write its long name without the dashes, as in `partition: gpu`.",
            )
    if job.settings.max_hours is not None and {"time", "t"} & set(job.settings.sbatch):
        raise UserInputError(
            "Both cluster.max_hours and cluster.sbatch.time are set.", fix="Remove one; both limit the job's time."
        )


def _directives(job: ClusterJob) -> Iterator[tuple[str, str]]:
    settings, given = job.settings, set(job.settings.sbatch)
    yield "job-name", job.name
    yield "nodes", str(job.nodes)
    yield "ntasks-per-node", "1"  # the launcher starts a node's processes itself
    if settings.gpus_per_node and not given & set(_GPUS):
        yield "gpus-per-node", str(settings.gpus_per_node)
    if settings.cpu and not given & set(_CPUS):
        yield "cpus-per-task", str(math.ceil(_number("cpu", settings.cpu)))
    if settings.memory and not given & set(_MEMORY):
        yield "mem", f"{math.ceil(_number('memory', settings.memory) / 2**20)}M"
    if settings.ephemeral_storage and "tmp" not in given:
        yield "tmp", f"{math.ceil(_number('ephemeral_storage', settings.ephemeral_storage) / 2**20)}M"
    if settings.max_hours is not None:
        yield "time", str(max(1, math.ceil(60 * settings.max_hours)))  # minutes
    if settings.working_dir:
        yield "chdir", settings.working_dir
    # To the script alone, this long before the time limit: it passes the signal on once.
    yield "signal", f"B:USR1@{min(job.grace_seconds, 65535)}"
    yield "requeue", ""
    yield "open-mode", "append"  # the log of an attempt does not replace the one before
    if not {"output", "o"} & given:
        yield "output", f"{job.name}-%j.log"
    yield from settings.sbatch.items()


def _option(name: str, value: str) -> str:
    dashes = "-" if len(name) == 1 else "--"
    if value.lower() in ("", "true"):
        return dashes + name
    shown = value if re.fullmatch(r"[\w%./:@,+=*\[\]-]+", value) else shlex.quote(value)
    return f"{dashes}{name}{' ' if len(name) == 1 else '='}{shown}"


def _number(name: str, quantity: str) -> float:
    try:
        return float(parse_quantity(quantity))
    except ValueError:
        raise UserInputError(
            f"cluster.{name} is '{quantity}', which is not a quantity.", fix="Write 16 for cores, 256Gi for memory."
        ) from None


def _environment(job: ClusterJob) -> Iterator[str]:
    for name in job.settings.secret_env:
        what = f"{name} is not set: export it before sbatch (cluster.secret_env)"
        yield f': "${{{name}:?{what}}}"'
    for name, value in job.env.items():
        yield f"export {name}={shlex.quote(value)}"
    if job.nodes > 1 and SECRET_VARIABLE not in {*job.settings.env, *job.settings.secret_env}:
        yield "# The nodes of this attempt authenticate each other with it; it is written nowhere."
        yield f"{SECRET_VARIABLE}=$(openssl rand -hex 32) || exit 1"
        yield f"export {SECRET_VARIABLE}"
    yield ""


def _write_config(job: ClusterJob) -> Iterator[str]:
    yield f'folder="$PWD/.shardtune/"{shlex.quote(job.name)}'
    yield '(umask 077 && mkdir -p "$folder") || exit 1'
    if job.config is None:
        return
    end = "END_OF_RUN_YAML"
    while end in job.config:
        end += "_"
    yield f"cat > \"$folder/{CONFIG_FILE}\" <<'{end}' || exit 1"
    yield job.config.rstrip("\n")
    yield end
    yield ""


def _doctor(job: ClusterJob) -> Iterator[str]:
    if job.settings.init_doctor:
        arguments = doctor_arguments(job, f'"$folder/{CONFIG_FILE}"')
        yield "# A node that is not fit ends the job before it trains."
        yield f"srun --ntasks-per-node=1 {' '.join(['shardtune doctor', *arguments])} || exit {WRONG_INPUT}"


def _step(job: ClusterJob) -> Iterator[str]:
    words = [
        f'"$folder/{CONFIG_FILE}"' if job.config is not None and word == f"{CONFIG_FOLDER}/{CONFIG_FILE}" else
        shlex.quote(word)
        for word in job.command
    ]  # fmt: skip
    yield _PASS_ON
    yield "# A node that has saved and left does not end the others, which may still be saving."
    yield f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 {' '.join(words)} &"
    yield _WAIT


# In the background, so that the shell handles signals while it waits; one of them goes to all nodes, through srun.
_PASS_ON = """\
step=
interrupted=0
pass_on() {
  interrupted=1
  if [ -n "$step" ]; then kill -USR1 "$step" 2> /dev/null; trap '' USR1 TERM; fi
}
trap pass_on USR1 TERM"""
_WAIT = """\
step=$!
if [ "$interrupted" = 1 ]; then pass_on; interrupted=0; fi
wait "$step"
code=$?
# Above 128 after a signal, it is the signal's number and not the result of srun: wait again.
while [ "$interrupted" = 1 ] && [ "$code" -gt 128 ]; do
  interrupted=0
  wait "$step"
  code=$?
done
"""


def _finish(job: ClusterJob) -> Iterator[str]:
    """Requeue after a preemption, and after a failure while there are restarts left (docs/exit-codes.md)."""
    restarts = job.settings.restarts
    yield _REQUEUE
    yield 'failures=$(cat "$folder/failures" 2> /dev/null || echo 0)'
    yield 'case "$code" in'
    yield f'  {DONE}) rm -f "$folder/failures" ;;'
    yield f'  {PREEMPTED}) requeue "stopped with a checkpoint" ;;'
    yield f"  {WRONG_INPUT} | {OUT_OF_MEMORY} | {INTERRUPTED}) ;;  # the same would happen again, or it was meant"
    yield f'  *) if [ "$failures" -lt {restarts} ]; then'
    yield '       echo $((failures + 1)) > "$folder/failures"'
    yield f'       requeue "exit code $code, restart $((failures + 1)) of {restarts}"'
    yield "     fi ;;"
    yield "esac"
    yield 'exit "$code"'


_REQUEUE = """\
# Not a job that was cancelled: its state says so before its processes end.
requeue() {
  case "$(scontrol --oneliner show job "$SLURM_JOB_ID")" in
    *" JobState=RUNNING "*) echo "$1: requeued" >&2; scontrol requeue "$SLURM_JOB_ID" ;;
    *) echo "$1: not requeued, because the job is no longer running" >&2 ;;
  esac
}"""
