"""What would `shardtune submit` do, as a script that a site keeps in its own pipeline? POSIX sh and kubectl."""

from __future__ import annotations

import json
import shlex

import yaml

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import SECRET_KEY
from shardtune.cluster.resources import SECRET, resource_of

_END = "END_OF_MANIFESTS"


def shell_script(manifests: Manifests, *, namespace: str | None, context: str | None) -> str:
    """A script that submits the job. The nodes' shared secret is generated when it runs, and is in no argument."""
    options = [f"--{name}={value}" for name, value in (("context", context), ("namespace", namespace)) if value]
    kubectl = shlex.join(["kubectl", *options])
    apply = f"{kubectl} apply --server-side --validate=strict --field-manager=shardtune -f -"
    secrets = [one for one in manifests.support if resource_of(one) == SECRET]
    rest = [one for one in manifests.support if one not in secrets]
    workload = manifests.workload
    address = f"{resource_of(workload).plural}.{_group(workload)}/{manifests.name}".replace("./", "/")
    lines = ["#!/bin/sh", f"# Submits {workload['kind']} {manifests.name}. Ends with an error if it exists.", "set -eu"]
    # Shells quote here-documents with a quoted end as they are: nothing in them is expanded.
    lines += [
        f"if {kubectl} get {address} >/dev/null 2>&1; then",
        f"  echo '{workload['kind']} {manifests.name} exists already' >&2",
        "  exit 1",
        "fi",
    ]
    for secret in secrets:
        lines += _secret(secret, kubectl)
    for documents in filter(None, (rest, [workload])):
        lines += [f"{apply} <<'{_END}'", _documents(documents).rstrip("\n"), _END]
    if manifests.support:
        lines += _owner(manifests, kubectl, address)
    return "\n".join(lines) + "\n"


def _group(manifest: Manifest) -> str:
    return str(manifest["apiVersion"]).rpartition("/")[0]


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
        resource = resource_of(manifest)
        named = f"{resource.plural}.{_group(manifest)}/{manifest['metadata']['name']}".replace("./", "/")
        lines.append(f"{kubectl} patch {named} --type=merge -p '{before}'\"$uid\"'{after}'")
    return lines


class _Dumper(yaml.SafeDumper):
    """Texts of several lines, such as run.yaml, as they are."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _documents(manifests: list[Manifest]) -> str:
    found: str = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return found
