"""`shardtune submit CONFIG --to TARGET`, or with a script behind `--`: how does the run start on a cluster?"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardtune.cli.options import AsJson, Config, Context, Namespace, NodeProcesses, Overrides, Script, To, Verbose
from shardtune.config.cluster_schema import Kind
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from rich.console import Console

    from shardtune.cli.cluster_job import DescribedJob
    from shardtune.cluster.api import Cluster
    from shardtune.cluster.manifests import Manifests

_CHECKED_HERE = "Nothing was sent: checked on this machine alone."


def submit(
    config: Config,
    script: Script = None,
    to: To = None,
    override: Overrides = None,
    name: Annotated[str | None, typer.Option("--name", metavar="N", help="The job's name (cluster.job_name).")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Number of machines (cluster.nodes).")
    ] = None,
    nproc: NodeProcesses = "",
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
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            metavar="CLAIM=FOLDER",
            help="docker, podman, local-pods: the folder here that stands for a claim.",
        ),
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option("--kind", help="local-pods: whose pods run here; default: jobset.")
    ] = None,
    secrets: Annotated[
        Path | None,
        typer.Option("--secrets", metavar="FOLDER", help="local-pods: values of Secrets, as files SECRET/KEY."),
    ] = None,
    no_namespaces: Annotated[
        bool, typer.Option("--no-namespaces", help="local-pods: as plain processes, with paths replaced.")
    ] = False,
    crd_dir: Annotated[
        Path | None, typer.Option("--crd-dir", metavar="DIR", help="The site's CRD files, to check the manifests with.")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Send a run to a cluster: checked here, tried on the server, then created whole or not at all.

    Behind -- stands a script instead of a training, as for `shardtune run`: docs/cluster.md, "Any script".

    Exit codes: 0 submitted (or nothing wrong in a dry run); 1 the cluster refused it or cannot be reached; 2 invalid
    input, nothing was sent. docker, podman and local-pods: the container's, or the first pod's that failed.
    """
    from rich.console import Console

    from shardtune.cli.cluster_job import described_job
    from shardtune.cli.submit_by_command import submit_by_command

    console = Console(stderr=print_script or output is not None or as_json)
    options = {"job_name": name, "nodes": nodes, "context": context, "namespace": namespace}
    described = described_job(config, override, to, kind, script=script, nproc=nproc, **options)
    _refuse_options(described.target, volume, secrets, no_namespaces=no_namespaces)
    if sum((print_script, output is not None, dry_run is not None)) > 1:
        raise UserInputError(
            "--print, --output and --dry-run are three things to do instead of sending.", fix="Name one."
        )
    if described.target == "local-pods" and (dry_run == "server" or print_script):
        raise UserInputError(
            "--to local-pods sends nothing to an API server, and runs no command that could be printed.",
            fix="Use --dry-run client, or --output yaml for what its pods are made from.",
        )
    if described.kind is None:
        _check(console, described, None, crd_dir, verbose=verbose)
        _summarize(console, described, None, verbose=verbose)
        submit_by_command(console, described, volume or (), dry_run=dry_run, print_script=print_script, output=output)
        if dry_run == "client" and not print_script:
            from shardtune.terminal import say

            say(console, "done", _CHECKED_HERE, "bold green")
        return
    offline = dry_run == "client" or print_script or output is not None or described.target == "local-pods"
    cluster = None if offline else _connect(described)
    described = described if cluster is None else _with_release(described, cluster)
    manifests = described.manifests()
    assert manifests is not None  # it has a kind
    if cluster is not None:
        cluster.namespace = str(manifests.workload["metadata"].get("namespace") or cluster.namespace)
    _check(console, described, manifests, crd_dir, verbose=verbose)
    _summarize(console, described, cluster, verbose=verbose)
    if print_script:
        _print_script(described, manifests)
    elif output is not None:
        _write(console, manifests, output)
    elif dry_run == "client":
        _finish(console, described, manifests, as_json, dry_run, _CHECKED_HERE)
    elif cluster is None:
        raise typer.Exit(_run_here(described, manifests, volume, secrets, no_namespaces=no_namespaces))
    else:
        _send(console, described, manifests, cluster, dry_run, as_json)


def _refuse_options(target: str, volume: list[str] | None, secrets: Path | None, *, no_namespaces: bool) -> None:
    """Options without effect for a target."""
    here = ("docker", "podman", "local-pods")
    if volume and target not in here:
        raise UserInputError(f"--volume is for --to {', '.join(here)}.", fix="Set cluster.volumes instead.")
    if (secrets is not None or no_namespaces) and target != "local-pods":
        raise UserInputError("--secrets and --no-namespaces are for --to local-pods.", fix="Leave them out.")


def _run_here(
    described: DescribedJob,
    manifests: Manifests,
    volume: list[str] | None,
    secrets: Path | None,
    *,
    no_namespaces: bool,
) -> int:
    from shardtune.cli.submit_by_command import folders_of
    from shardtune.cluster.local_pods import run_local_pods

    return run_local_pods(
        manifests,
        str(described.kind),
        volumes=folders_of(described.job, volume or ()),
        work_folder=Path("local-pods") / described.job.name,
        secrets=secrets,
        namespaces=False if no_namespaces else None,
    )


def _connect(described: DescribedJob) -> Cluster:
    from shardtune.cluster.api import connect

    settings = described.job.settings
    return connect(settings.context, settings.namespace)


def _with_release(described: DescribedJob, cluster: Cluster) -> DescribedJob:
    """Which release of Trainer the cluster has, for TrainJob, whose fields differ by release."""
    from shardtune.cluster.render_trainjob import release_of_crd
    from shardtune.cluster.resources import TRAINJOB

    if described.kind != "trainjob" or described.job.settings.trainer_release != "auto":
        return described
    crd = cluster.custom_resource(TRAINJOB)
    return described if crd is None else described.with_settings(trainer_release=release_of_crd(crd))


def _check(
    console: Console, described: DescribedJob, manifests: Manifests | None, crd_dir: Path | None, *, verbose: bool
) -> None:
    """An error ends it here. Notices are for -v and `cluster lint`."""
    from shardtune.cluster.check import check_before_sending

    job, plan, target = described.job, described.plan, described.target
    check_before_sending(console, job, manifests, plan, target, crd_dir=crd_dir, notices=verbose)


def _summarize(console: Console, described: DescribedJob, cluster: Cluster | None, *, verbose: bool) -> None:
    from shardtune.terminal import clock, count, say

    job, settings, plan = described.job, described.job.settings, described.plan
    where = f" in namespace {cluster.namespace}, context {cluster.access.context}" if cluster is not None else ""
    gpus = f" × {count(settings.gpus_per_node, 'GPU')}" if settings.gpus_per_node else ""
    kind = f" ({described.kind})" if described.kind not in (None, described.target) else ""
    say(console, "job", f"{job.name} → {described.target}{kind}{where}")
    model = f" ({settings.gpu})" if settings.gpu else ""
    say(console, "nodes", f"{job.nodes}{gpus}{model}, {count(job.nproc, 'process', 'es')} each")
    if settings.image:
        say(console, "image", settings.image)
    if job.script is not None:
        say(console, "script", str(job.script))
    if plan is None:
        say(console, "plan", f"memory was not checked: {described.no_plan}")
    else:
        from shardtune.plan.page import verdict

        took = f"; about {clock(plan.total.seconds)}" if plan.total is not None else ""
        say(console, "plan", f"{verdict(plan)}{took}")
    if verbose:
        say(console, "command", shlex.join(job.command))
        for name, why in job.reasons.items():
            say(console, "env", f"{name}={job.env[name]} ({why})")


def _print_script(described: DescribedJob, manifests: Manifests) -> None:
    from shardtune.cluster.shell_script import shell_script

    namespace = manifests.workload["metadata"].get("namespace")
    print(shell_script(manifests, namespace=namespace, context=described.job.settings.context), end="")


def _write(console: Console, manifests: Manifests, output: str) -> None:
    from shardtune.cluster.render import to_yaml, write_kustomize
    from shardtune.terminal import say

    if output == "yaml":
        print(to_yaml(manifests), end="")
        return
    if not (output.endswith("/") or Path(output).is_dir()):
        raise UserInputError(
            f"--output '{output}' is neither `yaml` nor a folder.", fix="Write `--output yaml`, or `--output DIR/`."
        )
    for file in write_kustomize(manifests, Path(output)):
        say(console, "written", str(file))


def _send(
    console: Console,
    described: DescribedJob,
    manifests: Manifests,
    cluster: Cluster,
    dry_run: str | None,
    as_json: bool,
) -> None:
    from shardtune.cluster import submit as submission
    from shardtune.terminal import say

    submission.check_name_free(cluster, manifests)
    for notice in submission.dry_run(cluster, manifests):
        say(console, "notice", notice, "yellow")
    for warning in dict.fromkeys(cluster.warnings):
        say(console, "warning", f"the server says: {warning}", "yellow")
    if dry_run == "server":
        text = "The server accepts every object; nothing was created."
        _finish(console, described, manifests, as_json, dry_run, text)
        return
    made = submission.submit(cluster, manifests)
    _finish(console, described, manifests, as_json, None, f"{made['kind']} {described.job.name} is created.", made)


def _finish(
    console: Console, described: DescribedJob, manifests: Manifests, as_json: bool, dry_run: str | None, text: str,
    made: Any = None,
) -> None:  # fmt: skip
    from shardtune.terminal import say

    job, namespace = described.job, manifests.workload["metadata"].get("namespace")
    if as_json:
        found = {
            "name": job.name, "namespace": made["metadata"]["namespace"] if made else namespace,
            "target": described.target, "kind": manifests.workload["kind"], "nodes": job.nodes, "dry_run": dry_run,
            "uid": made["metadata"]["uid"] if made else None,
        }  # fmt: skip
        print(json.dumps(found, indent=1))
        return
    say(console, "done", text, "bold green")
    if made is not None:
        where = f" -n {namespace}" if namespace else ""
        say(console, "next", f"shardtune logs -f {job.name}{where}   (or: status, describe, cancel, pull)")
