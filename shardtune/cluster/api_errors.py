"""What did the cluster mean? Every answer that is an error, in words, with the server's own message as it came."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from shardtune.cluster.resources import Resource
from shardtune.errors import ShardtuneError

_INSTALL = {
    "PyTorchJob": "Ask the cluster's administrator for it, or use another kind: --to trainjob, --to jobset, or "
    "--to job, which needs no operator.",
    "TrainJob": "Ask the cluster's administrator for it, or use another kind: --to pytorchjob, --to jobset, or "
    "--to job, which needs no operator.",
    "TrainingRuntime": "Ask the cluster's administrator for it, or use another kind: --to pytorchjob, --to jobset, or "
    "--to job, which needs no operator.",
    "JobSet": "Ask the cluster's administrator for it (it also comes with Kubeflow Trainer 2), or use --to job, which "
    "needs no operator.",
    "PodGroup": "Ask the cluster's administrator for it, or set cluster.gang_scheduling: none.",
}
_JOBS = "shardtune jobs"
_SCC_RULE = re.compile(r'provider "?([\w-]+)"?: (\S+?): (.*?)(?=, (?:provider|spec\.|\.)|\]|$)')


@dataclass(frozen=True)
class Call:
    """What was asked of the API server, for messages."""

    verb: str
    resource: Resource
    namespace: str | None
    name: str = ""

    def __str__(self) -> str:
        named = f"{self.resource.kind} '{self.name}'" if self.name else f"{self.resource.kind} objects"
        where = f" in namespace '{self.namespace}'" if self.namespace and self.resource.namespaced else ""
        return f"{self.verb} {named}{where}"


class ClusterError(ShardtuneError):
    """The cluster cannot be reached, or refused something."""


class ApiError(ClusterError):
    """An answer of the API server that is an error.

    Attributes:
        status: Of HTTP.
        message: The server's own words.
        missing_kind: The server does not know the kind at all: its CRD is not installed.
    """

    def __init__(self, what: str, *, why: str, fix: str, status: int, message: str, missing_kind: bool = False) -> None:
        super().__init__(what, why=why, fix=fix)
        self.status, self.message, self.missing_kind = status, message, missing_kind


@dataclass(frozen=True)
class Answer:
    """An error as the server sent it: a Status object, or text of something in between."""

    status: int
    message: str
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, status: int, body: bytes) -> Answer:
        text = body.decode("utf-8", "replace").strip()
        try:
            found = json.loads(text)
        except ValueError:
            return cls(status, first_words(text)[:500] or f"HTTP {status}")
        if not isinstance(found, dict):
            return cls(status, text[:500])
        message = str(found.get("message") or f"HTTP {status}")
        return cls(status, message, str(found.get("reason") or ""), found.get("details") or {})


def first_words(text: str) -> str:
    """Text as it is; of a web page that a proxy sent, what stands before it and its first line, without tags."""
    if not re.search(r"<(!doctype|html|head|body|title|h1)\b", text, re.IGNORECASE):
        return text
    shown = re.sub(r"<(style|script)\b.*?</\1>|<!--.*?-->", "", text, flags=re.IGNORECASE | re.DOTALL)
    lines = [line.strip() for line in re.sub(r"<[^>]*>", "\n", shown).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def api_error(call: Call, status: int, body: bytes, options: str = "") -> ApiError:
    """The error to raise for an answer of the API server with a status of 400 or more.

    Args:
        options: Of the commands that it names (`Cluster.options`).
    """
    answer = Answer.read(status, body)
    what, fix = _explain(call, answer)
    return ApiError(
        what,
        why=f"The server says: {answer.message}",
        fix=fix.replace(_JOBS, f"{_JOBS}{options}"),
        status=status,
        message=answer.message,
        missing_kind=_is_missing_kind(answer),
    )


def _explain(call: Call, answer: Answer) -> tuple[str, str]:
    """What happened and what to change, by status."""
    if "admission webhook" in answer.message and "denied the request" in answer.message:
        return f"A check of this cluster (an admission webhook) refused to {call}.", "Change what its message names."
    if "failed calling webhook" in answer.message:
        return (
            f"Cannot {call}: a webhook that has to allow it does not answer.",
            "The operator behind it is not running: tell the cluster's administrator.",
        )
    if "field not declared in schema" in answer.message:  # apply reports it as an internal error
        return _unknown_fields(call, re.findall(r"(\S+): field not declared in schema", answer.message))
    if answer.status == 500 and re.search(r"failed to (convert|create typed)", answer.message):  # apply again
        return _invalid(call, answer)
    by_status = {
        401: _unauthorized,
        403: _forbidden,
        404: _not_found,
        409: _conflict,
        400: _invalid,
        422: _invalid,
    }
    if answer.status in by_status:
        return by_status[answer.status](call, answer)
    if answer.status in (429, 500, 502, 503, 504):
        return f"The API server could not {call} now (HTTP {answer.status}).", "Try again in a minute."
    return f"The API server refused to {call} (HTTP {answer.status}).", "Change what its message names."


def _unauthorized(call: Call, answer: Answer) -> tuple[str, str]:
    return (
        "The cluster does not accept your credentials (401): they are invalid or have expired.",
        "Log in again (oc login, the cloud's CLI, or a new kubeconfig), and check with `kubectl auth whoami`.",
    )


def _forbidden(call: Call, answer: Answer) -> tuple[str, str]:
    message = answer.message
    if "exceeded quota" in message:
        return f"Cannot {call}: the namespace's quota is exceeded.", (
            f"Ask for less, or wait until others end. Look at what uses it: {_JOBS}."
        )
    if "security context constraint" in message:
        return f"OpenShift's security context constraints refuse the pod. {_scc(message)}".strip(), (
            "Leave cluster.run_as_uid, run_as_gid, fs_group and capabilities unset (OpenShift then chooses a uid), or "
            "have an administrator allow them for cluster.service_account."
        )
    if "violates PodSecurity" in message:
        return "The namespace's Pod Security level refuses the pod.", (
            "Set what the message names by cluster.run_as_uid or cluster.pod_overlay, or use another namespace."
        )
    if "being terminated" in message:
        return f"Cannot {call}: the namespace is being deleted.", "Use another one (--namespace)."
    if "error looking up service account" in message or "PriorityClass" in message:
        return f"Cannot {call}: something that it names does not exist.", (
            "Correct cluster.service_account or cluster.priority_class, as the message says."
        )
    rbac = re.search(r'cannot (\S+) resource "([^"]+)"', message)
    if rbac:
        where = f" in namespace '{call.namespace}'" if call.namespace else " in all namespaces"
        return f"You have no permission to {rbac[1]} {rbac[2]}{where}.", (
            f"Ask for a Role with the verb {rbac[1]} on {rbac[2]}, or use another namespace or context "
            "(--namespace, --context)."
        )
    return f"The cluster refused to {call}.", "Change what its message names, or ask the cluster's administrator."


def _scc(message: str) -> str:
    """What the constraints refuse, in words, without those that are not for this user anyway."""
    found: list[str] = []
    for provider, _, rest in _SCC_RULE.findall(message):
        if "not usable by user" in rest:
            continue
        value = re.search(r"Invalid value: (.*?): (.*)", rest)
        found.append(f"{provider}: {value[2]} (asked: {value[1]})" if value else f"{provider}: {rest}")
    return "; ".join(dict.fromkeys(found)) + "." if found else ""


def _is_missing_kind(answer: Answer) -> bool:
    """A 404 for an address that the server does not serve at all, rather than for one object."""
    if answer.status != 404:
        return False
    return "page not found" in answer.message or "could not find the requested resource" in answer.message


def _not_found(call: Call, answer: Answer) -> tuple[str, str]:
    kind = call.resource.kind
    if _is_missing_kind(answer):
        if not call.resource.operator:
            return f"This server does not know {call.resource.version} {kind}.", "Check that --context names a cluster."
        return (
            f"This cluster has no {kind} ({call.resource.version}): {call.resource.operator} is not installed.",
            _INSTALL.get(kind, "Ask the cluster's administrator for it."),
        )
    if answer.details.get("kind") == "namespaces":
        return (
            f"The namespace '{call.namespace}' does not exist.",
            "Name one that does: --namespace, cluster.namespace.",
        )
    return f"There is no {kind} '{call.name}' in namespace '{call.namespace}'.", f"List what there is: {_JOBS}."


def _conflict(call: Call, answer: Answer) -> tuple[str, str]:
    if answer.reason == "AlreadyExists":
        return f"{call.resource.kind} '{call.name}' exists already.", "Use another name (--name)."
    return f"Cannot {call}: it was changed or belongs to something else.", "Look at it, and try again."


def _invalid(call: Call, answer: Answer) -> tuple[str, str]:
    fields = [str(cause["field"]) for cause in answer.details.get("causes") or () if cause.get("field")]
    unknown = re.findall(r'unknown field "([^"]+)"', answer.message)
    if unknown:
        return _unknown_fields(call, unknown)
    if "Too long" in answer.message and "1048576" in answer.message:
        return f"{call.resource.kind} '{call.name}' is too large.", "Move large values out of the config."
    named = f": {', '.join(dict.fromkeys(fields))}" if fields else ""
    return f"The API server refused {call.resource.kind} '{call.name}'{named}.", "Change what its message names."


def _unknown_fields(call: Call, fields: list[str]) -> tuple[str, str]:
    kind = call.resource.kind
    fix = "Remove it (cluster.pod_overlay)."
    if kind == "TrainJob":
        fix = "Name the release of Kubeflow Trainer that the cluster has: cluster.trainer_release."
    return f"This cluster's {kind} has no field {', '.join(field.lstrip('.') for field in fields)}.", fix
