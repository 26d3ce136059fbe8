"""Which cluster is meant? The kubeconfig and its context, or the service account of the pod that we run in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.errors import UserInputError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Access:
    """How to reach a cluster.

    Attributes:
        configuration: Of the `kubernetes` client: address, certificates, credentials.
        context: Of the kubeconfig; `in-cluster` in a pod.
        namespace: The context's, or `default`.
        source: The file, for messages.
        other_context: Not the one that the kubeconfig would choose by itself.
    """

    configuration: Any
    context: str
    namespace: str
    source: str
    other_context: bool = False


def read_access(context: str | None = None, environ: Mapping[str, str] | None = None) -> Access:
    """The cluster that $KUBECONFIG (or ~/.kube/config) names, or the one around this pod.

    Raises:
        UserInputError: the package is missing, or there is no kubeconfig, it cannot be read, or has no such context.
    """
    environ = os.environ if environ is None else environ
    try:
        import kubernetes.client
        import kubernetes.config
    except ImportError:
        raise UserInputError(
            "The package `kubernetes` is not installed.", fix="pip install 'shardtune[cluster]'"
        ) from None
    configuration = kubernetes.client.Configuration()
    named = environ.get("KUBECONFIG") or str(Path(environ.get("HOME") or Path.home()) / ".kube" / "config")
    files = [file for file in named.split(os.pathsep) if file and Path(file).is_file()]
    if not files:
        if environ.get("KUBERNETES_SERVICE_HOST") and not environ.get("KUBECONFIG") and context is None:
            return _in_cluster(configuration)
        raise UserInputError(
            f"There is no kubeconfig: '{named}' does not exist.",
            fix="Log in to the cluster (oc login, the cloud's CLI), or set KUBECONFIG to the file.",
        )
    return _from_file(configuration, os.pathsep.join(files), context)


def _from_file(configuration: Any, files: str, context: str | None) -> Access:
    import kubernetes.config
    import yaml

    try:
        contexts, active = kubernetes.config.list_kube_config_contexts(files)
        known = {str(one["name"]): one.get("context") or {} for one in contexts}
        if context is not None and context not in known:
            raise UserInputError(
                f"The kubeconfig has no context '{context}'.",
                fix=f"It has: {', '.join(sorted(known))} ('{files}').",
            )
        kubernetes.config.load_kube_config(files, context, configuration)
    except (kubernetes.config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserInputError(
            f"The kubeconfig '{files}' cannot be used.",
            why=" ".join(str(error).split()),
            fix="Log in again, or check it with `kubectl config view`.",
        ) from None
    chosen = context or str(active["name"])
    namespace = str(known.get(chosen, {}).get("namespace") or "default")
    return Access(configuration, chosen, namespace, files, other_context=chosen != (active or {}).get("name"))


def _in_cluster(configuration: Any) -> Access:
    import kubernetes.config

    try:
        kubernetes.config.load_incluster_config(configuration)
        namespace = (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except (kubernetes.config.ConfigException, OSError) as error:
        raise UserInputError(
            "There is no kubeconfig, and this pod has no service account to use instead.",
            why=str(error),
            fix="Set KUBECONFIG, or give the pod a service account with its token mounted.",
        ) from None
    return Access(configuration, "in-cluster", namespace or "default", str(_SERVICE_ACCOUNT))
