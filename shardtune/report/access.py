"""Who may see the dashboard? Checks before every request: the host name, and a token where others can connect."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COOKIE = "shardtune-token"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether the address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessMiddleware:
    """ASGI middleware: read-only requests, for the right host name, with the token if there is one.

    DNS rebinding: another site can make a browser send requests under its own name, resolved to 127.0.0.1. On
    loopback, where there is no token, only names of this machine are therefore accepted.

    Args:
        names: Accepted host names; empty: any (then there must be a token).
        token: Given once as `?token=…` and then kept in a cookie, or sent as `Authorization: Bearer …`.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], token: str | None) -> None:
        if not names and not token:
            raise ValueError("a dashboard that accepts any host name needs a token")
        self.app, self.names, self.token = app, frozenset(names), token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    given[name] = value
            await send(message)

        refusal = self._refuse(scope, headers)
        await (refusal or self.app)(scope, receive, with_headers)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("The dashboard is read-only.", 405, {"Allow": "GET, HEAD"})
        if self.names and _name(headers.get("host", "")) not in self.names:
            return PlainTextResponse("Unknown host name: open the address that `shardtune dashboard` printed.", 421)
        if self.token is None:
            return None
        asked = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if self._is_right(asked.pop("token", None)):
            # Remove it from the address: it would stay in the history and in copied links.
            rest = f"?{urlencode(asked)}" if asked else ""
            answer = RedirectResponse(f"/{scope['path'].lstrip('/')}{rest}", 303)
            answer.set_cookie(_COOKIE, self.token, httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if (scheme.lower() == "bearer" and self._is_right(given)) or self._is_right(_cookie(headers)):
            return None
        return PlainTextResponse("A token is required: open the address that `shardtune dashboard` printed.", 401)

    def _is_right(self, given: str | None) -> bool:
        expected = (self.token or "").encode()
        return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), expected)


def _name(host: str) -> str:
    """`localhost:8000` → `localhost`, `[::1]:8000` → `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _cookie(headers: Headers) -> str | None:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return None
    return jar[_COOKIE].value if _COOKIE in jar else None
