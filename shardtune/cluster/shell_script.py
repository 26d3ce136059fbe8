"""What would `shardtune submit` do, as a script that a site keeps in its own pipeline? POSIX sh and kubectl."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import SECRET_KEY
from shardtune.cluster.render import to_yaml
from shardtune.cluster.resources import SECRET, resource_of

_END = "END_OF_MANIFESTS"


def shell_script(manifests: Manifests, *, namespace: str | None, context: str | None) -> str:
    """A script that submits the job. The nodes' shared secret is generated when it runs, and is in no argument."""
    kubectl = _kubectl(namespace, context)
    workload, address = manifests.workload, _address(manifests.workload)
    lines = ["#!/bin/sh", f"# Submits {workload['kind']} {manifests.name}. Ends with an error if it exists.", "set -eu"]
    lines += [
        *_stop_if(f"{kubectl} get {address}", f"{workload['kind']} {manifests.name} exists already"),
        *_support(manifests.support, kubectl),
        *_apply([workload], kubectl),
    ]
    if manifests.support:
        lines += _owner(manifests, kubectl, address)
    return "\n".join(lines) + "\n"


def command_script(
    support: Sequence[Manifest], argv: Sequence[str], *, name: str, project: str, namespace: str | None,
    context: str | None, warning: str | None = None,
) -> str:  # fmt: skip
    """The same where a command of Run:ai makes the job, and only refers to what is made beside it.

    Args:
        warning: What the user has to check; a comment.
    """
    kubectl = _kubectl(namespace, context)
    describe = shlex.join(["runai", "training", "pytorch", "describe", name, "--project", project])
    lines = ["#!/bin/sh", f"# Submits {name} to Run:ai. Ends with an error if it exists."]
    lines += [f"# WARNING: {warning}"] if warning else []
    lines += ["set -eu", "runai whoami >/dev/null  # logged in? before anything is created"]
    lines += _stop_if(describe, f"Run:ai job {name} exists already in project {project}")
    for one in support:
        delete = f"{kubectl} delete {_address(one)}"
        said = f"{one['kind']} {one['metadata']['name']} exists already; if no job uses it: {delete}"
        lines += _stop_if(f"{kubectl} get {_address(one)}", said)
    return "\n".join([*lines, *_support(support, kubectl), shlex.join(argv)]) + "\n"


def _stop_if(succeeds: str, said: str) -> list[str]:
    return [f"if {succeeds} >/dev/null 2>&1; then", f"  echo {shlex.quote(said)} >&2", "  exit 1", "fi"]


def _kubectl(namespace: str | None, context: str | None) -> str:
    options = [f"--{name}={value}" for name, value in (("context", context), ("namespace", namespace)) if value]
    return shlex.join(["kubectl", *options])


def _address(manifest: Manifest) -> str:
    group = str(manifest["apiVersion"]).rpartition("/")[0]
    return f"{resource_of(manifest).plural}{f'.{group}' if group else ''}/{manifest['metadata']['name']}"


def _support(support: Sequence[Manifest], kubectl: str) -> list[str]:
    secrets = [one for one in support if resource_of(one) == SECRET]
    lines = [line for secret in secrets for line in _secret(secret, kubectl)]
    return lines + _apply([one for one in support if one not in secrets], kubectl)


def _apply(manifests: Sequence[Manifest], kubectl: str) -> list[str]:
    """As a here-document whose end is quoted: the shell expands nothing in it."""
    if not manifests:
        return []
    apply = f"{kubectl} apply --server-side --validate=strict --field-manager=shardtune -f -"
    return [f"{apply} <<'{_END}'", to_yaml(manifests).rstrip("\n"), _END]


def _secret(manifest: Manifest, kubectl: str) -> list[str]:
    name = shlex.quote(str(manifest["metadata"]["name"]))
    labels = [f"{key}={value}" for key, value in (manifest["metadata"].get("labels") or {}).items()]
    return [
        "# The value goes through a pipe: it is never an argument, which other users of the machine could see.",
        "head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' |",
        f"  {kubectl} create secret generic {name} --from-file={SECRET_KEY}=/dev/stdin",
        f"{kubectl} label secret {name} {shlex.join(labels)}",
    ]


def _owner(manifests: Manifests, kubectl: str, address: str) -> list[str]:
    """Make the objects beside the job its own, so that they are deleted with it."""
    lines = [f"uid=$({kubectl} get {address} -o 'jsonpath={{.metadata.uid}}')"]
    owner = {"apiVersion": manifests.workload["apiVersion"], "kind": manifests.workload["kind"], "name": manifests.name}
    before, after = json.dumps({"metadata": {"ownerReferences": [{**owner, "uid": "@"}]}}).split("@")
    for manifest in manifests.support:
        lines.append(f"{kubectl} patch {_address(manifest)} --type=merge -p '{before}'\"$uid\"'{after}'")
    return lines
