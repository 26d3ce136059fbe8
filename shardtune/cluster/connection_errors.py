"""Why is the cluster not reached? Failures below HTTP, in words: the address, the context, and what to do."""

from __future__ import annotations

import re

from shardtune.cluster.api_errors import ClusterError
from shardtune.cluster.kubeconfig import Access
from shardtune.errors import ShardtuneError


class StreamCutError(ShardtuneError):
    """A stream ended before its end: whoever follows it opens it again."""


def connection_error(access: Access, error: Exception) -> ShardtuneError:
    """The error to raise for one of urllib3, of a socket, of TLS or of the credentials."""
    if isinstance(error, ShardtuneError):
        return error
    import kubernetes.config

    text = _innermost(error)
    where = f"{access.configuration.host} (context '{access.context}' of {access.source})"
    if isinstance(error, kubernetes.config.ConfigException):
        return ClusterError("The credentials of the kubeconfig cannot be used.", why=text, fix="Log in again.")
    if isinstance(error, FileNotFoundError):
        missing = error.filename or text
        return ClusterError(
            f"A file that the kubeconfig names is missing: {missing}.",
            why=f"It belongs to context '{access.context}' of {access.source}.",
            fix="Log in to the cluster again.",
        )
    if "CERTIFICATE_VERIFY_FAILED" in text or "SSL" in text or "certificate" in text.lower():
        return ClusterError(
            f"No secure connection to {where}.",
            why=text,
            fix="If the certificate is not trusted or has expired, log in again for the current one. If something "
            "else answers at this address, such as a proxy, check the address.",
        )
    if re.search(r"timed? ?out", text, re.IGNORECASE):
        return ClusterError(
            f"The cluster does not answer: {where}.",
            why=text,
            fix="Check that you are in its network (VPN), and try again.",
        )
    return ClusterError(
        f"The cluster cannot be reached: {where}.",
        why=text,
        fix="Check that it is running, that you are in its network (VPN), and that the context is right (--context).",
    )


def _innermost(error: BaseException) -> str:
    """The text of the cause, without what urllib3 wraps around it: the objects' addresses help nobody."""
    text = " ".join(str(error).split())
    text = re.sub(r"<?urllib3\.\S+ object at 0x[0-9a-f]+>?: ?", "", text)
    text = re.sub(r"HTTPS?Connection\(host='([^']*)', port=(\d+)\): ?", "", text)
    text = re.sub(r"HTTPS?ConnectionPool\(host='([^']*)', port=(\d+)\): ?", "", text)
    return text or type(error).__name__
