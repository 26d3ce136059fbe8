"""What does the dashboard serve? A page, its scripts, and a read-only API with three requests."""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from shardtune import __version__
from shardtune.errors import UserInputError
from shardtune.report.access import AccessMiddleware, is_loopback
from shardtune.report.api import RunsApi
from shardtune.report.page import SCRIPTS, asset, chart_library, shell
from shardtune.report.runs import is_run_path

_LIBRARY = "plotly.js"
_SCRIPTS = (_LIBRARY, *SCRIPTS, "live.js")


def application(root: Path, names: Sequence[str], token: str | None, *, local: bool = False) -> Starlette:
    """The dashboard of the runs in `root`.

    Args:
        local: It is seen from this machine alone, where links to other servers of this machine lead somewhere.
    """
    api = RunsApi(root, local=local)
    texts = {name: asset(name) for name in (*SCRIPTS, "live.js", "style.css")} | {_LIBRARY: chart_library()}
    static, version = static_route(texts)
    empty = shell(_SCRIPTS, version)

    def page(request: Request) -> Response:
        if not is_run_path(request.path_params.get("name", "any")):
            return Response(status_code=404)
        return HTMLResponse(empty, headers={"Cache-Control": "no-cache"})

    def runs(request: Request) -> Response:
        return _answer(api.runs(request.query_params.get("cursor")))

    def run(request: Request) -> Response:
        return _answer(api.run(request.path_params["name"], request.query_params.get("cursor")))

    def compare(request: Request) -> Response:
        return _answer(api.compare(request.query_params.getlist("run"), request.query_params.get("cursor")))

    routes = [
        Route("/", page),
        Route("/runs/{name:path}", page),
        Route("/compare", page),
        static,
        Route("/api/runs", runs),
        Route("/api/runs/{name:path}", run),
        Route("/api/compare", compare),
    ]
    # The access check is the outermost: nothing is read for requests without access.
    inside = [
        Middleware(AccessMiddleware, names=names, token=token),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4),
    ]
    return Starlette(routes=routes, middleware=inside)


def static_route(texts: Mapping[str, str]) -> tuple[Route, str]:
    """Scripts and styles by name, and their version: pages name it, so that browsers keep no old ones."""

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in texts:
            return Response(status_code=404)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(texts[name], media_type=kind, headers={"Cache-Control": "private, max-age=86400"})

    version = hashlib.sha256((__version__ + "".join(texts.values())).encode()).hexdigest()[:12]
    return Route("/static/{name}", static), version


def _answer(found: dict[str, Any] | None) -> Response:
    headers = {"Cache-Control": "no-store"}
    if found is None:
        found = {"gone": True}  # not a 404: a page that polls a deleted run would fill the browser's log
    return JSONResponse(found, headers=headers)


@dataclass(frozen=True)
class Address:
    """Where a dashboard listens, and the URL to open."""

    listening: socket.socket
    url: str
    token: str | None
    names: tuple[str, ...]


def listen(host: str, port: int, token: str | None, what: str = "The dashboard") -> Address:
    """Bind the port, and decide on access: from other machines only with a token.

    Args:
        token: None: one is generated if needed.
        what: Is served, for messages.

    Raises:
        UserInputError: the address cannot be bound.
    """
    local = is_loopback(host)
    if token is not None and not re.fullmatch(r"[!-~]{8,}", token):
        raise UserInputError(
            "--token is too short, or has characters that do not fit into an address.",
            fix="Use at least 8 of the characters that an English keyboard has, or omit it to have one generated.",
        )
    if token is None and not local:
        token = secrets.token_urlsafe(24)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserInputError(
            f"{what} cannot listen on {host}, port {port}.",
            why=getattr(error, "strerror", None) or str(error),
            fix="Choose another --port (0 picks a free one), or an address of this machine for --host.",
        ) from error
    number = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    names = ("127.0.0.1", "localhost", "::1", host) if local else ()
    query = f"?{urlencode({'token': token})}" if token else ""
    return Address(listening, f"http://{shown}:{number}/{query}", token, names)


def serve(root: Path, address: Address, ready: Callable[[], None]) -> None:
    """Serve the dashboard until interrupted."""
    local = bool(address.names)
    serve_site(application(root, address.names, address.token, local=local), address, ready)


class SiteServer(uvicorn.Server):
    """Serves a site until it is told to end.

    Args:
        ending: Called when it is: what still answers should end by itself, or it is cancelled with a traceback.
    """

    def __init__(self, site: Starlette, ending: Callable[[], None] = lambda: None) -> None:
        # No access log: the first address has the token in it.
        super().__init__(
            uvicorn.Config(
                site,
                access_log=False,
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=2,
                server_header=False,
            )
        )
        self._ending = ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._ending()
        super().handle_exit(sig, frame)


def serve_site(
    site: Starlette, address: Address, ready: Callable[[], None], ending: Callable[[], None] = lambda: None
) -> None:
    """Serve until interrupted."""
    ready()
    try:
        SiteServer(site, ending).run(sockets=[address.listening])
    except KeyboardInterrupt:  # uvicorn shuts down cleanly, then re-raises the signal
        pass
    finally:
        address.listening.close()
