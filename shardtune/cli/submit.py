"""`shardtune submit CONFIG --to TARGET`: how does the run start on a cluster?"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardtune.cli.options import AsJson, Config, Context, Namespace, Overrides, Verbose
from shardtune.config.cluster_schema import Target

if TYPE_CHECKING:
    from rich.console import Console

    from shardtune.cluster.api import Cluster
    from shardtune.cluster.manifests import Manifests
    from shardtune.cluster.spec import ClusterJob
    from shardtune.config import ResolvedConfig
    from shardtune.plan.report import Plan

KUBERNETES = ("trainjob", "pytorchjob", "jobset", "job")


def submit(
    config: Config,
    to: Annotated[Target | None, typer.Option("--to", help="Where it goes; default: cluster.target.")] = None,
    override: Overrides = None,
    name: Annotated[str | None, typer.Option("--name", metavar="N", help="The job's name (cluster.job_name).")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Number of machines (cluster.nodes).")
    ] = None,
    dry_run: Annotated[
        Literal["client", "server"] | None,
        typer.Option(
            "--dry-run",
            help="Create nothing. client: render and check here, nothing is contacted; server: the API server checks "
            "every object too.",
        ),
    ] = None,
    print_script: Annotated[
        bool, typer.Option("--print", help="Print what would be run, as a shell script; create nothing.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="yaml|DIR/", help="Print the manifests, or write a kustomize folder; create nothing."
        ),
    ] = None,
    crd_dir: Annotated[
        Path | None, typer.Option("--crd-dir", metavar="DIR", help="The site's CRD files, to check the manifests with.")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Send a run to a cluster: checked here, tried on the server, then created whole or not at all.

    Exit codes: 0 submitted (or nothing wrong in a dry run); 1 the cluster refused it or cannot be reached; 2 invalid
    input, nothing was sent.
    """
    from rich.console import Console

    from shardtune.config import load_config

    asked = {"target": to, "job_name": name, "nodes": nodes, "context": context, "namespace": namespace}
    options = [f"cluster.{key}={value}" for key, value in asked.items() if value is not None]
    resolved = load_config(config, [*(override or ()), *options], cluster_profile=True)
    offline = dry_run == "client" or print_script or output is not None
    console = Console(stderr=print_script or output is not None or as_json)
    prepared = _prepare(resolved, config, console, offline=offline, crd_dir=crd_dir)
    _summarize(console, prepared, verbose=verbose)
    if print_script:
        print(_script(prepared), end="")
    elif output is not None:
        _write(console, prepared, output)
    elif dry_run == "client":
        _finish(console, prepared, as_json, dry_run, "Nothing was sent: checked on this machine alone.")
    else:
        _send(console, prepared, dry_run, as_json)


@dataclass(frozen=True)
class _Prepared:
    """A job that has passed the checks of this machine."""

    job: ClusterJob
    target: str
    manifests: Manifests
    plan: Plan | None
    no_plan: str
    cluster: Cluster | None

    @property
    def namespace(self) -> str | None:
        if self.cluster is not None:
            return self.cluster.namespace
        found = self.manifests.workload["metadata"].get("namespace")
        return str(found) if found else None


def _prepare(
    resolved: ResolvedConfig, file: Path, console: Console, *, offline: bool, crd_dir: Path | None
) -> _Prepared:
    from shardtune.cluster.api import connect
    from shardtune.cluster.spec import make_job
    from shardtune.errors import UserInputError

    settings = resolved.config.cluster
    if settings.target is None:
        raise UserInputError(
            "Where should the job go?", fix=f"Name it with --to or cluster.target: {', '.join(KUBERNETES)}, runai, …."
        )
    plan, no_plan = _plan(resolved)
    job = make_job(resolved, file, plan)
    cluster = None if offline else connect(settings.context, settings.namespace)
    if cluster is not None:
        job = _with_release(job, settings.target, cluster)
    manifests = _render(job, settings.target)
    if cluster is not None:
        cluster.namespace = str(manifests.workload["metadata"].get("namespace") or cluster.namespace)
    _check(console, job, manifests, plan, settings.target, crd_dir)
    return _Prepared(job, settings.target, manifests, plan, no_plan, cluster)


def _plan(resolved: ResolvedConfig) -> tuple[Plan | None, str]:
    """What the run needs on the cluster's GPUs, or why nobody can tell here."""
    from shardtune.cli.plan import plan_of
    from shardtune.errors import ShardtuneError

    settings = resolved.config.cluster
    if settings.command:
        return None, "the job runs a command of its own"
    if not settings.gpus_per_node or settings.gpu is None:
        return None, "cluster.gpus_per_node and cluster.gpu do not say which GPUs the nodes have"
    try:
        return plan_of(resolved, gpus=f"{settings.gpus_per_node}x{settings.gpu}", nodes=settings.nodes), ""
    except ShardtuneError as error:
        return None, error.what


def _with_release(job: ClusterJob, target: str, cluster: Cluster) -> ClusterJob:
    """Which release of Trainer the cluster has, for TrainJob, whose fields differ by release."""
    from shardtune.cluster.resources import TRAINJOB

    settings = job.settings
    kind = settings.runai_kind if target == "runai" else target
    if kind != "trainjob" or settings.trainer_release != "auto":
        return job
    crd = cluster.custom_resource(TRAINJOB)
    release = _part("shardtune.cluster.render_trainjob", "release_of_crd")
    if crd is None or release is None:
        return job
    return replace(job, settings=settings.model_copy(update={"trainer_release": release(crd)}))


def _render(job: ClusterJob, target: str) -> Manifests:
    from shardtune.errors import UserInputError

    render = _part("shardtune.cluster.render", "render")
    if render is not None and target in KUBERNETES:
        return render(job, target)  # type: ignore[no-any-return]
    if target == "job":
        from shardtune.cluster.render_job import render_job

        return render_job(job)
    raise UserInputError(f"`--to {target}` is not available in this version.", fix=f"Use {', '.join(KUBERNETES)}.")


def _check(
    console: Console, job: ClusterJob, manifests: Manifests, plan: Plan | None, target: str, crd_dir: Path | None
) -> None:
    """Lint, then schemas; an error of either ends here."""
    from shardtune.errors import UserInputError
    from shardtune.terminal import say

    lint, check = _part("shardtune.cluster.lint", "lint"), _part("shardtune.cluster.schemas", "check")
    findings = lint(job, manifests, plan, target) if lint is not None else []
    for one in findings:
        say(
            console, one.severity, f"{one.path}: {one.what} [{one.rule}]", "bold red" if one.severity == "error" else ""
        )
        say(console, "", f"→ {one.fix}")
    wrong = sum(one.severity == "error" for one in findings)
    problems = list(check(manifests, crd_dir)) if check is not None else []
    for problem in problems:
        say(console, "error", str(problem), "bold red")
    if wrong or problems:
        raise UserInputError(
            f"The job has {wrong + len(problems)} errors; nothing was sent.", fix="Correct what is named above."
        )


def _part(module: str, name: str) -> Any:
    """A function of a module that may not be there yet."""
    if importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), name)


def _summarize(console: Console, prepared: _Prepared, *, verbose: bool) -> None:
    from shardtune.terminal import clock, count, say

    job, settings, plan = prepared.job, prepared.job.settings, prepared.plan
    where = f"namespace {prepared.namespace}" if prepared.namespace else "the context's namespace"
    context = f", context {prepared.cluster.access.context}" if prepared.cluster else ""
    gpus = f" × {count(settings.gpus_per_node, 'GPU')}" if settings.gpus_per_node else ""
    kind = prepared.manifests.workload["kind"]
    say(console, "job", f"{job.name}: {kind} in {where}{context}")
    say(
        console, "nodes", f"{job.nodes}{gpus}{f' ({settings.gpu})' if settings.gpu else ''}, {job.nproc} processes each"
    )
    say(console, "image", settings.image or "none")
    if plan is None:
        say(console, "plan", f"memory was not checked: {prepared.no_plan}")
    else:
        from shardtune.plan.page import verdict

        took = f"; about {clock(plan.total.seconds)}" if plan.total is not None else ""
        say(console, "plan", f"{verdict(plan)}{took}")
    if verbose:
        say(console, "command", " ".join(job.command))
        for name, why in job.reasons.items():
            say(console, "env", f"{name}={job.env[name]} ({why})")


def _script(prepared: _Prepared) -> str:
    from shardtune.cluster.shell_script import shell_script

    return shell_script(prepared.manifests, namespace=prepared.namespace, context=prepared.job.settings.context)


def _write(console: Console, prepared: _Prepared, output: str) -> None:
    from shardtune.errors import UserInputError
    from shardtune.terminal import say

    if output == "yaml":
        to_yaml = _part("shardtune.cluster.render", "to_yaml")
        if to_yaml is None:
            import yaml

            print(yaml.safe_dump_all(list(prepared.manifests), sort_keys=False, allow_unicode=True), end="")
        else:
            print(to_yaml(prepared.manifests), end="")
        return
    write = _part("shardtune.cluster.render", "write_kustomize")
    if write is None or not (output.endswith("/") or Path(output).is_dir()):
        raise UserInputError(
            f"--output '{output}' is neither `yaml` nor a folder.", fix="Write `--output yaml`, or `--output DIR/`."
        )
    for file in write(prepared.manifests, Path(output)):
        say(console, "written", str(file))


def _send(console: Console, prepared: _Prepared, dry_run: str | None, as_json: bool) -> None:
    from shardtune.cluster import submit as submission
    from shardtune.terminal import say

    assert prepared.cluster is not None
    submission.check_name_free(prepared.cluster, prepared.manifests)
    for notice in submission.dry_run(prepared.cluster, prepared.manifests):
        say(console, "notice", notice, "yellow")
    for warning in dict.fromkeys(prepared.cluster.warnings):
        say(console, "warning", f"the server says: {warning}", "yellow")
    if dry_run == "server":
        _finish(console, prepared, as_json, dry_run, "The server accepts every object; nothing was created.")
        return
    made = submission.submit(prepared.cluster, prepared.manifests)
    _finish(console, prepared, as_json, None, f"{made['kind']} {prepared.job.name} is created.", made)


def _finish(
    console: Console, prepared: _Prepared, as_json: bool, dry_run: str | None, text: str, made: Any = None
) -> None:
    from shardtune.terminal import say

    name = prepared.job.name
    if as_json:
        found = {
            "name": name, "namespace": prepared.namespace, "target": prepared.target, "dry_run": dry_run,
            "kind": prepared.manifests.workload["kind"], "nodes": prepared.job.nodes,
            "uid": made["metadata"]["uid"] if made else None,
        }  # fmt: skip
        print(json.dumps(found, indent=1))
        return
    say(console, "done", text, "bold green")
    if made is not None:
        where = f" -n {prepared.namespace}" if prepared.job.settings.namespace else ""
        say(console, "next", f"shardtune logs -f {name}{where}   (or: status, describe, cancel, pull)")
        sys.stdout.flush()
