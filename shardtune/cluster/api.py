"""How do we talk to a cluster? Plain dicts to and from its API server; every failure becomes an error in words.

A request is made once: what fails is reported, not repeated. Only following a log reconnects (`logs`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from shardtune import __version__
from shardtune.cluster.api_errors import ApiError, Call, ClusterError, api_error
from shardtune.cluster.connection_errors import StreamCutError, connection_error
from shardtune.cluster.exec_stream import Execution
from shardtune.cluster.kubeconfig import Access, read_access
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.resources import CUSTOM_RESOURCE, POD, Resource, resource_of

FIELD_MANAGER = "shardtune"
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 30.0
_SILENT_STREAM_SECONDS = 120.0  # a log that is silent for longer is opened again: the connection may be dead
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
_PAGE = 500


class Cluster:
    """One cluster, as one user.

    Attributes:
        access: Which one, and how.
        namespace: Where a request goes that names none.
        warnings: What the server warned of (deprecated fields, Pod Security) since it was last emptied.
    """

    def __init__(self, access: Access, namespace: str | None = None) -> None:
        import kubernetes.client

        self.access = access
        self.namespace = namespace or access.namespace
        self.warnings: list[str] = []
        self._configuration = access.configuration
        try:
            self._pool = kubernetes.client.ApiClient(access.configuration).rest_client.pool_manager
        except (OSError, ValueError) as error:  # certificates that cannot be read
            raise connection_error(access, error) from None

    @property
    def options(self) -> str:
        """What a command named in a message needs to reach this namespace too; begins with a space, or is empty."""
        return self.options_for(self.namespace)

    def options_for(self, namespace: str) -> str:
        words = ["-n", namespace] if namespace != self.access.namespace else []
        words += ["--context", self.access.context] if self.access.other_context else []
        return f" {shlex.join(words)}" if words else ""

    def get(self, resource: Resource, name: str, namespace: str | None = None) -> Manifest:
        """One object.

        Raises:
            ApiError: with status 404 there is none.
        """
        where = self._where(resource, namespace)
        return self._json("GET", resource.path(where, name), Call("get", resource, where, name))

    def find(self, resource: Resource, name: str, namespace: str | None = None) -> Manifest | None:
        """One object, or None where there is none, or not even its kind."""
        try:
            return self.get(resource, name, namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list_all(
        self, resource: Resource, *, namespace: str | None = None, everywhere: bool = False, labels: str = "",
        fields: str = "",
    ) -> list[Manifest]:  # fmt: skip
        """The objects of a namespace (or `everywhere`) that the selectors match. They carry no `kind` of their own
        from the server, so it is put in."""
        where = None if everywhere else self._where(resource, namespace)
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(_PAGE)}
        found: list[Manifest] = []
        while True:
            page = self._json("GET", resource.path(where), Call("list", resource, where), query=query)
            found += page.get("items") or []
            rest = str((page.get("metadata") or {}).get("continue") or "")
            if not rest:
                break
            query = {**query, "continue": rest}
        return [{**one, "apiVersion": resource.version, "kind": resource.kind} for one in found]

    def create(self, manifest: Manifest, *, namespace: str | None = None, dry_run: bool = False) -> Manifest:
        """Make an object that must not exist; fields that the server does not know are refused."""
        resource, name, where = self._address(manifest, namespace)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        call = Call("create", resource, where, name)
        return self._json("POST", resource.path(where), call, query=query, body=manifest)

    def apply(self, manifest: Manifest, *, namespace: str | None = None, dry_run: bool = False) -> Manifest:
        """Server-side apply, never by force: fields of another manager are a conflict."""
        resource, name, where = self._address(manifest, namespace)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        call = Call("apply", resource, where, name)
        return self._json("PATCH", resource.path(where, name), call, query=query, body=manifest, content_type=_APPLY)

    def patch(self, resource: Resource, name: str, changes: Manifest, namespace: str | None = None) -> Manifest:
        """A merge patch."""
        where = self._where(resource, namespace)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        call = Call("change", resource, where, name)
        return self._json("PATCH", resource.path(where, name), call, query=query, body=changes, content_type=_MERGE)

    def delete(
        self, resource: Resource, name: str, namespace: str | None = None, *, uid: str | None = None,
        propagation: str = "Background", grace_seconds: int | None = None,
    ) -> None:  # fmt: skip
        """Delete an object, with `uid` only that very one, and by propagation what it owns."""
        where = self._where(resource, namespace)
        options: Manifest = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        self._json("DELETE", resource.path(where, name), Call("delete", resource, where, name), body=options)

    def custom_resource(self, resource: Resource) -> Manifest | None:
        """The CRD of a kind; None where it is not installed or may not be read (it is not in a namespace)."""
        group = resource.version.partition("/")[0]
        try:
            return self.find(CUSTOM_RESOURCE, f"{resource.plural}.{group}")
        except ApiError as error:
            if error.status == 403:
                return None
            raise

    def preferred_version(self, group: str) -> str | None:
        """Which version of an API group the server prefers; None if it has no such group."""
        call = Call("read", CUSTOM_RESOURCE, None, group)
        try:
            found = self._json("GET", f"/apis/{group}", call)
        except ApiError as error:
            if error.status in (403, 404):
                return None
            raise
        return str((found.get("preferredVersion") or {}).get("version") or "") or None

    def pod_log(
        self, pod: str, container: str, *, namespace: str | None = None, follow: bool = False,
        since_time: str | None = None, since_seconds: int | None = None, previous: bool = False,
    ) -> LogStream:  # fmt: skip
        """A container's log with timestamps. It is open when this returns.

        Raises:
            ApiError: the pod is gone (404) or the container has not started yet (400).
        """
        where = self._where(POD, namespace)
        asked = {
            "container": container, "timestamps": "true", "follow": str(follow).lower(),
            "previous": str(previous).lower(), "sinceTime": since_time or "",
            "sinceSeconds": str(since_seconds) if since_seconds else "",
        }  # fmt: skip
        call = Call("read the log of", POD, where, pod)
        silent = _SILENT_STREAM_SECONDS if follow else _READ_SECONDS
        return LogStream(self._request("GET", POD.path(where, pod, "log"), call, query=asked, read_seconds=silent))

    def execute(self, pod: str, container: str, command: list[str], namespace: str | None = None) -> Execution:
        """Start a command in a running container; iterate over the result for its standard output.

        Raises:
            ApiError: refused.
        """
        where = self._where(POD, namespace)
        words = [("container", container), ("stdout", "true"), ("stderr", "true")]
        words += [("command", word) for word in command]
        url = f"{self._configuration.host}{POD.path(where, pod, 'exec')}?{urlencode(words)}"
        return Execution.start(self.access, url, self._credentials(), Call("run a command in", POD, where, pod))

    def _where(self, resource: Resource, namespace: str | None) -> str | None:
        return (namespace or self.namespace) if resource.namespaced else None

    def _address(self, manifest: Manifest, namespace: str | None) -> tuple[Resource, str, str | None]:
        resource, metadata = resource_of(manifest), manifest["metadata"]
        return resource, str(metadata["name"]), self._where(resource, metadata.get("namespace") or namespace)

    def _credentials(self) -> dict[str, str]:
        token = self._configuration.auth_settings().get("BearerToken")  # refreshed here where a plugin issues it
        return {"authorization": token["value"]} if token and token.get("value") else {}

    def _json(
        self, method: str, path: str, call: Call, *, query: Mapping[str, str] | None = None, body: Any = None,
        content_type: str = "application/json",
    ) -> Manifest:  # fmt: skip
        import urllib3

        response = self._request(method, path, call, query=query, body=body, content_type=content_type)
        try:
            data = response.read()
            found = json.loads(data) if data else {}
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise connection_error(self.access, error) from None
        except ValueError:
            raise ClusterError(
                f"What answers at {self._configuration.host} is not a Kubernetes API server.",
                why=f"It sent: {data[:200].decode('utf-8', 'replace')}",
                fix=f"Check the address of context '{self.access.context}' in {self.access.source}.",
            ) from None
        return dict(found)

    def _request(
        self, method: str, path: str, call: Call, *, query: Mapping[str, str] | None = None, body: Any = None,
        content_type: str = "application/json", read_seconds: float = _READ_SECONDS,
    ) -> Any:  # fmt: skip
        """The response of a request that succeeded, unread."""
        import kubernetes.config
        import urllib3

        asked = urlencode({name: value for name, value in (query or {}).items() if value})
        url = f"{self._configuration.host}{quote(path)}{f'?{asked}' if asked else ''}"
        headers = {"Accept": "application/json, */*", "User-Agent": f"shardtune/{__version__}"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            response = self._pool.request(
                method, url, headers={**headers, **self._credentials()}, preload_content=False, retries=False,
                body=json.dumps(body).encode() if body is not None else None,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=read_seconds),
            )  # fmt: skip
            if response.status >= 300:
                raise api_error(call, response.status, response.read(), self.options)
        except (urllib3.exceptions.HTTPError, OSError, kubernetes.config.ConfigException) as error:
            raise connection_error(self.access, error) from None
        self.warnings += _warnings(response.headers)
        return response


class LogStream:
    """Iterate over it for lines, without their ends, as they come; StreamCutError if the connection ends first."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        return _lines(self._response)

    def __enter__(self) -> LogStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()


def connect(context: str | None = None, namespace: str | None = None) -> Cluster:
    """The cluster that the kubeconfig's context names. Nothing is sent yet."""
    return Cluster(read_access(context), namespace)


def _lines(response: Any) -> Iterator[bytes]:
    """Whole lines as they arrive; the last one may lack its end if the log ends so, but not if the connection does."""
    import urllib3

    rest = b""
    try:
        chunks = response.stream() if response.chunked else iter(lambda: response.read1(65536), b"")
        for chunk in chunks:
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise StreamCutError(str(error)) from None
    if rest:
        yield rest


def _warnings(headers: Any) -> list[str]:
    """The text of `Warning: 299 - "text"` headers."""
    found = []
    for line in headers.getlist("Warning") if hasattr(headers, "getlist") else ():
        _, _, text = line.partition(' "')
        found.append(text.removesuffix('"').replace('\\"', '"') or line)
    return found
