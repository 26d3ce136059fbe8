"""A stand-in of a Kubernetes API server on a loopback port: objects are stored, errors are worded as the real one does.

What it does not have is controllers: a test puts pods, conditions and log lines where they would.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

TOKEN = "good-token"
CORE = ("api/v1", "apis/batch/v1", "apis/apiextensions.k8s.io/v1")
CRDS = {
    "trainjobs": "apis/trainer.kubeflow.org/v1alpha1", "trainingruntimes": "apis/trainer.kubeflow.org/v1alpha1",
    "pytorchjobs": "apis/kubeflow.org/v1", "jobsets": "apis/jobset.x-k8s.io/v1alpha2",
}  # fmt: skip
_PATH = re.compile(
    r"/(?P<base>api/v1|apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>log|exec|status))?"
)
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Refusal(Exception):
    """A Status that is an error."""

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.body = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
            "reason": reason, "details": details or {}, "code": code,
        }  # fmt: skip
        self.code = code


class ContainerLog:
    """What a container has printed: tests append to it while it is followed."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.previous: list[tuple[str, str]] = []
        self.ended = False
        self.cut_after: list[int] = []  # cut the next connections after so many lines, in the middle of one
        self.requests: list[dict[str, str]] = []

    def add(self, *texts: str, stamp: str | None = None) -> None:
        for text in texts:
            self.lines.append((stamp or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z"), text))

    def restart(self) -> None:
        self.previous, self.lines = self.lines, []


class ApiServer:
    """Storage and faults; `url` is where it listens. Use as a context manager."""

    def __init__(self, root: Path) -> None:
        self.root = root  # the file system of every container
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.namespaces = {"default", "ml"}
        self.crds = dict(CRDS)
        self.forbidden: set[tuple[str, str]] = set()  # (verb, plural)
        self.refuse: dict[tuple[str, str], Refusal] = {}  # (verb, plural), real requests only
        self.refuse_dry: dict[str, Refusal] = {}  # by plural
        self.lose_answer_of: set[str] = set()  # plural: it is created, and the connection breaks
        self.logs: dict[tuple[str, str], ContainerLog] = {}
        self.exec_status: bytes | None = None  # sent as the end of every command, which is not run
        self.requests: list[tuple[str, str]] = []
        self.warnings: list[str] = []
        self.on_create: dict[str, Any] = {}  # plural: called with the object
        self._version = 0
        self.lock = threading.RLock()
        server = self

        class Handler(_Handler):
            api = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> ApiServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def kubeconfig(self, folder: Path, *, token: str = TOKEN, url: str | None = None, namespace: str = "ml") -> Path:
        file = folder / "kubeconfig"
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "lab",
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "dev", "namespace": namespace}}],
            "clusters": [{"name": "lab", "cluster": {"server": url or self.url}}],
            "users": [{"name": "dev", "user": {"token": token}}],
        }  # fmt: skip
        file.write_text(json.dumps(content), encoding="utf-8")
        return file

    # --- what tests do in place of controllers ---

    def put(self, plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """Store an object as a controller would have made it."""
        with self.lock:
            made = copy.deepcopy(manifest)
            meta = made["metadata"]
            meta.setdefault("namespace", "ml")
            meta.setdefault("uid", str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
            self._version += 1
            meta["resourceVersion"] = str(self._version)
            self.objects[plural, meta["namespace"], meta["name"]] = made
            return made

    def of(self, plural: str) -> list[dict[str, Any]]:
        with self.lock:
            return [one for (kind, _, _), one in self.objects.items() if kind == plural]

    def names(self, *plurals: str) -> list[str]:
        return sorted(f"{plural}/{one['metadata']['name']}" for plural in plurals for one in self.of(plural))

    def log(self, pod: str, container: str = "trainer") -> ContainerLog:
        return self.logs.setdefault((pod, container), ContainerLog())

    # --- requests ---

    def create(self, plural: str, namespace: str, body: dict[str, Any], *, dry: bool) -> dict[str, Any]:
        if namespace not in self.namespaces:
            message = f'namespaces "{namespace}" not found'
            raise Refusal(404, "NotFound", message, {"name": namespace, "kind": "namespaces"})
        name = body["metadata"]["name"]
        if (plural, namespace, name) in self.objects:
            message = f'{plural} "{name}" already exists'
            raise Refusal(409, "AlreadyExists", message, {"name": name, "kind": plural})
        check_pods(body)
        if dry:
            if plural in self.refuse_dry:
                raise self.refuse_dry[plural]
            return {**body, "metadata": {**body["metadata"], "namespace": namespace, "uid": str(uuid.uuid4())}}
        made = self.put(plural, {**body, "metadata": {**body["metadata"], "namespace": namespace}})
        if plural in self.on_create:
            self.on_create[plural](made)
        return made

    def delete(self, plural: str, namespace: str, name: str, options: dict[str, Any]) -> None:
        found = self.objects.get((plural, namespace, name))
        if found is None:
            raise not_found(plural, name)
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted and wanted != found["metadata"]["uid"]:
            message = f'Operation cannot be fulfilled on {plural} "{name}": the UID in the precondition ({wanted}) does not match'
            raise Refusal(409, "Conflict", message)
        del self.objects[plural, namespace, name]
        if options.get("propagationPolicy") != "Orphan":
            self._collect(found["metadata"]["uid"])

    def _collect(self, uid: str) -> None:
        """What the garbage collector does."""
        for key, one in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences") or ()):
                self.objects.pop(key, None)
                self._collect(one["metadata"]["uid"])


def not_found(plural: str, name: str) -> Refusal:
    return Refusal(404, "NotFound", f'{plural} "{name}" not found', {"name": name, "kind": plural})


def check_pods(manifest: dict[str, Any]) -> None:
    """Strict decoding, for the one unknown field that tests use, and a Pod's own validation where it is a Pod."""
    kind, version = manifest["kind"], manifest["apiVersion"].rpartition("/")[2]
    unknown = [path for path in paths(manifest) if path.endswith(".bogus")]
    if unknown:
        message = f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding error: '
        raise Refusal(400, "BadRequest", message + ", ".join(f'unknown field "{one}"' for one in unknown))
    if kind != "Pod":
        return
    volumes = {one["name"] for one in manifest["spec"].get("volumes") or ()}
    for number, container in enumerate(manifest["spec"]["containers"]):
        for mount, one in enumerate(container.get("volumeMounts") or ()):
            if one["name"] not in volumes:
                field = f"spec.containers[{number}].volumeMounts[{mount}].name"
                message = f'Pod "{manifest["metadata"]["name"]}" is invalid: {field}: Not found: "{one["name"]}"'
                raise Refusal(422, "Invalid", message, {"causes": [{"field": field, "message": "Not found"}]})


def paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}.{key}".lstrip(".")
            yield from paths(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from paths(inner, f"{path}[{number}]")


def merge(base: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return patch
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.api.requests.append((self.command, self.path))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            self._answer(url.path, query, body)
        except Refusal as refusal:
            self._send(refusal.code, refusal.body)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _answer(self, path: str, query: dict[str, str], body: Any) -> None:
        found = _PATH.fullmatch(path)
        if found is None or not self._served(found["base"], found["plural"]):
            self._send(404, b"404 page not found\n", "text/plain; charset=utf-8")
            return None
        plural, name, namespace = found["plural"], found["name"] or "", found["namespace"] or ""
        if found["sub"] in ("log", "exec"):
            self._allow("get" if found["sub"] == "log" else "create", f"{plural}/{found['sub']}", namespace)
            if (plural, namespace, name) not in self.api.objects:
                raise not_found(plural, name)
            if not (self.api.objects[plural, namespace, name].get("status") or {}).get("containerStatuses"):
                message = f'container "{query.get("container")}" in pod "{name}" is waiting to start: ContainerCreating'
                raise Refusal(400, "BadRequest", message)
            return self._log(name, query) if found["sub"] == "log" else self._exec(name)
        verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[self.command]
        self._allow(verb, plural, namespace)
        dry = query.get("dryRun") == "All"
        if not dry and (verb, plural) in self.api.refuse:
            raise self.api.refuse[verb, plural]
        with self.api.lock:
            code, answer = getattr(self, f"_{verb}")(plural, namespace, name, query, body)
        if verb == "create" and not dry and plural in self.api.lose_answer_of:
            self.close_connection = True
            self.connection.close()
            return None
        self._send(code, answer)
        return None

    def _served(self, base: str, plural: str) -> bool:
        return base in CORE if plural not in CRDS else self.api.crds.get(plural) == base

    def _allow(self, verb: str, plural: str, namespace: str) -> None:
        if (verb, plural) in self.api.forbidden:
            group = next((CRDS[one].split("/")[1] for one in CRDS if one == plural), "")
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            message = (
                f'{plural} is forbidden: User "dev" cannot {verb} resource "{plural}" in API group "{group}"{where}'
            )
            raise Refusal(403, "Forbidden", message, {"kind": plural})

    def _get(self, plural: str, namespace: str, name: str, *_: Any) -> tuple[int, Any]:
        if plural == "namespaces":
            if name not in self.api.namespaces:
                raise not_found(plural, name)
            return 200, {"kind": "Namespace", "metadata": {"name": name}}
        found = self.api.objects.get((plural, namespace, name))
        if found is None:
            raise not_found(plural, name)
        return 200, found

    def _list(self, plural: str, namespace: str, _: str, query: dict[str, str], __: Any) -> tuple[int, Any]:
        wanted = [one.partition("=")[::2] for one in query.get("labelSelector", "").split(",") if one]
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        items = [
            {key: value for key, value in one.items() if key not in ("kind", "apiVersion")}
            for one in self.api.of(plural)
            if (not namespace or one["metadata"]["namespace"] == namespace)
            and (not name or one["metadata"]["name"] == name)
            and all((one["metadata"].get("labels") or {}).get(key) == value for key, value in wanted)
        ]
        return 200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}

    def _create(self, plural: str, namespace: str, _: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        assert query["fieldValidation"] == "Strict", "unknown fields would be dropped silently"
        assert query["fieldManager"] == "shardtune"
        return 201, self.api.create(plural, namespace, body, dry=query.get("dryRun") == "All")

    def _patch(self, plural: str, namespace: str, name: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        assert query["fieldManager"] == "shardtune"
        assert query["fieldValidation"] == "Strict"
        dry = query.get("dryRun") == "All"
        found = self.api.objects.get((plural, namespace, name))
        if self.headers["Content-Type"] == "application/apply-patch+yaml":
            if found is None:
                return 201, self.api.create(plural, namespace, body, dry=dry)
        elif found is None:
            raise not_found(plural, name)
        uid = body["metadata"].get("uid") if "metadata" in body else None
        if uid and uid != found["metadata"]["uid"]:
            message = (
                f'Operation cannot be fulfilled on {plural} "{name}": Precondition failed: UID in precondition: {uid}'
            )
            raise Refusal(409, "Conflict", message)
        merged = merge(found, body)
        if not dry:
            self.api.objects[plural, namespace, name] = merged
        return 200, merged

    def _delete(self, plural: str, namespace: str, name: str, _: Any, body: Any) -> tuple[int, Any]:
        self.api.delete(plural, namespace, name, body or {})
        return 200, {"kind": "Status", "status": "Success"}

    def _send(self, code: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for text in self.api.warnings if self.command == "POST" else ():
            quoted = text.replace('"', '\\"')
            self.send_header("Warning", f'299 - "{quoted}"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _log(self, pod: str, query: dict[str, str]) -> None:
        """As a kubelet streams it: since whole seconds, whole lines unless the connection is cut."""
        log = self.api.log(pod, query["container"])
        log.requests.append(query)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines = log.previous if query.get("previous") == "true" else log.lines
        cut = log.cut_after.pop(0) if log.cut_after else None
        sent, number = 0, 0
        while True:
            while number < len(lines):
                stamp, text = lines[number]
                number += 1
                if query.get("sinceTime", "")[:19] > stamp[:19]:
                    continue
                if cut is not None and sent == cut:
                    self._chunk(f"{stamp} {text[: len(text) // 2]}".encode())
                    self.close_connection = True
                    self.connection.close()
                    return
                self._chunk(f"{stamp} {text}\n".encode())
                sent += 1
            gone = lines is not log.previous and lines is not log.lines
            if query.get("follow") != "true" or log.ended or gone:
                break
            time.sleep(0.01)
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _exec(self, pod: str) -> None:
        """Run the command here, in the containers' common root: standard output on channel 1, its end on channel 3."""
        words = [value for key, value in parse_qsl(urlsplit(self.path).query) if key == "command"]
        key = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + _GUID).encode()).digest()).decode()
        self.send_response(101)
        offered = self.headers["Sec-WebSocket-Protocol"].split(",")[0].strip()
        for name, value in (
            ("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", key),
            ("Sec-WebSocket-Protocol", offered),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.api.exec_status is not None:
            self._frame(3, self.api.exec_status)
            self.close_connection = True
            return
        local = [str(self.api.root) + word if word.startswith("/") else word for word in words]
        done = subprocess.run(local, capture_output=True)
        for start in range(0, len(done.stdout), 32_768):
            self._frame(1, done.stdout[start : start + 32_768])
        self._frame(2, done.stderr)
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if done.returncode:
            cause = {"reason": "ExitCode", "message": str(done.returncode)}
            status = {
                "status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]},
                "message": f"command terminated with non-zero exit code: exit status {done.returncode}",
            }  # fmt: skip
        self._frame(3, json.dumps(status).encode())
        self.close_connection = True

    def _frame(self, channel: int, data: bytes) -> None:
        if not data:
            return
        payload = bytes([channel]) + data
        size = len(payload)
        header = struct.pack("!BB", 0x82, size) if size < 126 else struct.pack("!BBH", 0x82, 126, size)
        if size >= 65_536:
            header = struct.pack("!BBQ", 0x82, 127, size)
        self.wfile.write(header + payload)
        self.wfile.flush()
