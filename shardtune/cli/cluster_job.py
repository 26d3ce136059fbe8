"""Which job do CONFIG or a script describe, and for which target? For `submit`, `cluster lint` and `cluster scc`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from shardtune.cluster.manifests import Manifests
    from shardtune.cluster.spec import ClusterJob
    from shardtune.config import ResolvedConfig
    from shardtune.plan.report import Plan


@dataclass(frozen=True)
class DescribedJob:
    """A job and where it goes.

    Attributes:
        kind: What Kubernetes makes of it; None where nothing does (Slurm, a container here, Run:ai's command).
        plan: What the run needs, or None and `no_plan` says why nobody can tell here.
    """

    job: ClusterJob
    target: str
    kind: str | None
    plan: Plan | None
    no_plan: str = ""

    def manifests(self) -> Manifests | None:
        """Its objects, where Kubernetes gets any."""
        from shardtune.cluster.render import render
        from shardtune.cluster.render_runai import for_runai

        if self.kind is None:
            return None
        return render(for_runai(self.job) if self.target == "runai" else self.job, self.kind)

    def with_settings(self, **changes: object) -> DescribedJob:
        settings = self.job.settings.model_copy(update=changes)
        return replace(self, job=replace(self.job, settings=settings))


def described_job(
    config: Path | None,
    override: Sequence[str] | None,
    to: str | None,
    kind: str | None = None,
    *,
    script: Sequence[str] | None = None,
    nproc: str = "",
    **options: Any,
) -> DescribedJob:
    """Args:
        config: None for a script without one.
        to: Where it goes; None leaves it to `cluster.target`.
        kind: For local-pods: the kind whose pods run here.
        script: What stands behind `--`, instead of a training.
        nproc: Processes of each node; "" leaves it to `parallel.nproc`.
        options: Settings of `cluster` from options of their own (`nodes=3`); None are not given.

    Raises:
        UserInputError: nobody said where it goes, or the config is wrong.
    """
    from shardtune.cluster.spec import make_job
    from shardtune.config import load_config
    from shardtune.config.cluster_schema import Target
    from shardtune.config.script_config import load_script_config
    from shardtune.errors import UserInputError
    from shardtune.script.command import ScriptCommand

    asked: Mapping[str, Any] = {"target": to, **options}
    words = [f"cluster.{key}={value}" for key, value in asked.items() if value is not None]
    words += [f"parallel.nproc={nproc}"] if nproc else []
    overrides = [*(override or ()), *words]
    command = ScriptCommand.parse(script) if script else None
    if command is not None:
        resolved = load_script_config(config, overrides, cluster_profile=True)
    else:
        assert config is not None, "a training has a config file"
        resolved = load_config(config, overrides, cluster_profile=True)
    target = resolved.config.cluster.target
    if target is None:
        raise UserInputError(
            "Where does the job go?", fix=f"Add --to or set cluster.target: {', '.join(get_args(Target))}."
        )
    plan, no_plan = _plan(resolved) if command is None else (None, "what a script needs is not known before it runs")
    job = make_job(resolved, config, plan, command)
    return DescribedJob(job, target, _kind(target, job, kind), plan, no_plan)


def _kind(target: str, job: ClusterJob, asked: str | None) -> str | None:
    from shardtune.cluster.render import RENDERERS
    from shardtune.errors import UserInputError

    if asked is not None and target != "local-pods":
        raise UserInputError(f"--kind has no effect with --to {target}.", fix="Remove it; it is for --to local-pods.")
    if target in RENDERERS:
        return target
    if target == "local-pods":
        return asked or "jobset"
    return job.settings.runai_kind if target == "runai" and job.settings.runai_submit == "manifest" else None


def _plan(resolved: ResolvedConfig) -> tuple[Plan | None, str]:
    """What the run needs on the cluster's GPUs, or why nobody can tell here."""
    from shardtune.cli.plan import plan_of
    from shardtune.errors import ShardtuneError
    from shardtune.launch.named_paths import check_inputs

    settings = resolved.config.cluster
    if settings.command:
        return None, "the job runs a command of its own"
    if not settings.gpus_per_node or settings.gpu is None:
        return None, "cluster.gpus_per_node and cluster.gpu do not say which GPUs the nodes have"
    try:
        check_inputs(resolved.config)
    except ShardtuneError as error:  # paths of the container
        return None, error.what
    return plan_of(resolved, gpus="", nodes=None), ""
