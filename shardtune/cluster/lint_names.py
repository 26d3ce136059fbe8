"""Will Kubernetes take the names? Of the job and what its controller makes of it, labels, variables, Secrets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint_finding import Finding, Rule, error, warning
from shardtune.cluster.spec import NAME_CHARACTERS

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject

RULES = (
    Rule(
        "name-length",
        "error",
        "A job's name from which pods, Services or labels of more than 63 characters are made (TrainJob and "
        "JobSet: `NAME-node-0-9-abcde`, with a coordinator `NAME-node-0-0.NAME`; PyTorchJob: `NAME-worker-8`; "
        f"Job: `NAME-9`). The job's own name has at most {NAME_CHARACTERS} characters; a longer one is invalid input.",
        "The job is accepted, and nothing runs.",
    ),
    Rule(
        "object-name",
        "error",
        "The name of a claim, Secret, ServiceAccount, namespace, queue or priority class that cannot be one.",
        "The API server refuses the pod, or finds nothing of that name.",
    ),
    Rule(
        "label",
        "error",
        "A label or node selector whose key or value is malformed or too long (63 characters).",
        "The API server refuses it.",
    ),
    Rule(
        "annotation",
        "error",
        "An annotation whose key is malformed.",
        "The API server refuses it.",
    ),
    Rule(
        "env-name",
        "error",
        "A variable with a name that no shell could set.",
        "The API server refuses it, or programs do not see it.",
    ),
    Rule(
        "env-twice",
        "warning",
        "A variable that is set twice.",
        "The last one wins, silently.",
    ),
    Rule(
        "secret-reference",
        "error",
        "`secret_env` that is not SECRET/KEY.",
        "The pod does not start.",
    ),
)

_MOST = 63
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
_NAMED = ("namespace", "service_account", "priority_class", "queue")


def check_names(subject: Subject) -> Iterator[Finding]:
    yield from _check_job_name(subject)
    yield from _check_object_names(subject)
    yield from _check_labels(subject)
    yield from _check_variables(subject)
    yield from _check_secret_env(subject)


def derived_names(subject: Subject) -> Iterator[tuple[str, str]]:
    """What the kind's controller makes of the job's name, at its longest: (what it is, the name)."""
    name, last = subject.job.name, subject.job.nodes - 1
    if subject.kind == "pytorchjob" and last > 0:
        yield "a worker's pod and Service", f"{name}-worker-{last - 1}"
    elif subject.kind in ("trainjob", "jobset"):
        yield "a pod", f"{name}-node-0-{last}-abcde"
        if subject.manifests is not None and (subject.manifests.workload.get("spec") or {}).get("coordinator"):
            yield "the coordinator's label", f"{name}-node-0-0.{name}"
    elif subject.kind == "job":
        yield "a pod's host name", f"{name}-{last}"
    if subject.manifests is not None:
        services = (one for one in subject.manifests.support if one.get("kind") == "Service")
        yield from (("the Service", str(service["metadata"]["name"])) for service in services)


def _check_job_name(subject: Subject) -> Iterator[Finding]:
    if not subject.is_kubernetes:
        return
    for what_it_is, name in derived_names(subject):
        if (excess := len(name) - _MOST) > 0:
            what = f"{what_it_is} would be called '{name}': {len(name)} characters, and {_MOST} are allowed"
            per_character = 2 if "." in name else 1  # the coordinator's label has it twice
            most = len(subject.job.name) - -(-excess // per_character)
            yield error(
                "name-length",
                "cluster.job_name",
                what,
                f"Choose a name of at most {min(most, NAME_CHARACTERS)} characters.",
            )


def _check_object_names(subject: Subject) -> Iterator[Finding]:
    if not subject.is_kubernetes:
        return
    settings = subject.settings
    named = [(f"cluster.{key}", value) for key in _NAMED if (value := getattr(settings, key))]
    named += [(f"cluster.volumes[{index}].claim", volume.claim) for index, volume in enumerate(settings.volumes)]
    named += [(f"cluster.image_pull_secrets[{index}]", name) for index, name in enumerate(settings.image_pull_secrets)]
    named += [(f"cluster.env_from_secrets[{index}]", name) for index, name in enumerate(settings.env_from_secrets)]
    for path, name in named:
        if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
            what = f"'{name}' cannot be a name in Kubernetes"
            yield error("object-name", path, what, "Names have lower-case letters, digits, dashes and dots.")


def _check_labels(subject: Subject) -> Iterator[Finding]:
    if not subject.is_kubernetes:
        return
    settings = subject.settings
    places: list[tuple[str, str, dict[str, Any]]] = [
        ("label", "cluster.labels", dict(settings.labels)),
        ("label", "cluster.node_selector", dict(settings.node_selector)),
        ("annotation", "cluster.annotations", dict(settings.annotations)),
    ]
    known = {**settings.labels, **settings.node_selector, **settings.annotations}
    for pod in subject.pods:  # what the overlay has added
        for rule, where, found in (
            ("label", f"{pod.path}.metadata.labels", pod.metadata.get("labels")),
            ("label", f"{pod.path}.spec.nodeSelector", pod.spec.get("nodeSelector")),
            ("annotation", f"{pod.path}.metadata.annotations", pod.metadata.get("annotations")),
        ):
            added = {key: value for key, value in (found or {}).items() if known.get(key) != value}
            places.append((rule, where, added))
    for rule, where, pairs in places:
        for key, value in pairs.items():
            yield from _check_pair(rule, f"{where}.{key}", str(key), str(value))


def _check_pair(rule: str, path: str, key: str, value: str) -> Iterator[Finding]:
    prefix, slash, name = key.rpartition("/")
    if not _KEY_NAME.fullmatch(name) or (slash and (not _SUBDOMAIN.fullmatch(prefix) or len(prefix) > 253)):
        what = f"'{key}' cannot be the key of {'a label' if rule == 'label' else 'an annotation'}"
        fix = "Write NAME or DOMAIN/NAME; NAME has at most 63 letters, digits, '-', '_' and '.'."
        yield error(rule, path, what, fix)
    if rule == "label" and not _LABEL_VALUE.fullmatch(value):
        what = (
            f"its value has {len(value)} characters" if len(value) > _MOST else f"'{value}' cannot be a label's value"
        )
        fix = "At most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends."
        yield error(rule, path, what, fix + ("" if len(value) <= _MOST else " Longer texts can be annotations."))


def _check_variables(subject: Subject) -> Iterator[Finding]:
    for variable in subject.variables:
        if not _VARIABLE.fullmatch(variable.name):
            what = f"'{variable.name}' cannot be the name of a variable"
            yield error("env-name", variable.path, what, "Use letters, digits and '_', with no digit first.")
    both = set(subject.settings.env) & set(subject.settings.secret_env)
    for name in sorted(both):
        what = f"{name} is in env and in secret_env"
        yield warning("env-twice", f"cluster.env.{name}", what, "Remove one of them; the Secret's wins.")
    for path, container in subject.containers:
        names = Counter(str(entry.get("name")) for entry in container.get("env") or ())
        for name in (name for name, number in names.items() if number > 1 and name not in both):
            what = f"{name} is set {names[name]} times; the last one wins"
            yield warning("env-twice", f"{path}.env", what, "Keep one of them.")


def _check_secret_env(subject: Subject) -> Iterator[Finding]:
    for name, where in subject.settings.secret_env.items():
        secret, _, key = where.partition("/")
        if not _SUBDOMAIN.fullmatch(secret) or not _SECRET_KEY.fullmatch(key):
            # It may be the secret itself, pasted here: it is not repeated.
            what = f"the value of {name} is not SECRET/KEY"
            fix = "Write the name of a Secret of the namespace and one of its keys, such as hub/token; never a value."
            yield error("secret-reference", f"cluster.secret_env.{name}", what, fix)
