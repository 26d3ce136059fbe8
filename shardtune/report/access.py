"""Who may see our pages? Checks before every request: its host name, its origin, a token where others can connect."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "shardtune-token"  # and the port: cookies do not tell ports apart, and several sites may be served here
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


@dataclass(frozen=True)
class Site:
    """What is served, as far as access is concerned.

    Attributes:
        command: That prints its address, for messages.
        posts: Paths that accept POST with JSON; everything else is read-only.
    """

    command: str = "shardtune dashboard"
    posts: frozenset[str] = frozenset()


DASHBOARD = Site()


class AccessMiddleware:
    """ASGI middleware: requests for the right host name, with the token if there is one, by methods that `site` takes.

    DNS rebinding: another site can make a browser send requests under its own name, resolved to 127.0.0.1. On
    loopback, where there is no token, only names of this machine are therefore accepted.

    Requests across sites: a page of another site (or of another port) can make a browser send a POST here. Such a
    request names its origin, or says that it is not of the same origin, and cannot be JSON without asking first (which
    is refused like any other method).

    Args:
        names: Accepted host names; empty: any (then there must be a token).
        token: Given once as `?token=…` and then kept in a cookie, or sent as `Authorization: Bearer …`.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], token: str | None, site: Site = DASHBOARD) -> None:
        if not names and not token:
            raise ValueError("a site that accepts any host name needs a token")
        self.app, self.names, self.token, self.site = app, frozenset(names), token, site

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
        method = scope["method"]
        posts = method == "POST" and scope["path"] in self.site.posts
        if method not in ("GET", "HEAD") and not posts:
            allowed = "GET, HEAD" + (", POST" if scope["path"] in self.site.posts else "")
            what = "This address takes" if self.site.posts else "The dashboard is read-only: it takes"
            return PlainTextResponse(f"{what} {allowed}.", 405, {"Allow": allowed})
        if self.names and _name(headers.get("host", "")) not in self.names:
            return PlainTextResponse(f"Unknown host name: open the address that `{self.site.command}` printed.", 421)
        if posts and (refusal := _refuse_foreign(headers)):
            return refusal
        return self._refuse_without_token(scope, headers, redirect=not posts) if self.token is not None else None

    def _refuse_without_token(self, scope: Scope, headers: Headers, *, redirect: bool) -> Response | None:
        asked = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        cookie = f"{COOKIE}-{scope['server'][1]}"
        if redirect and self._is_right(asked.pop("token", None)):
            # Remove it from the address: it would stay in the history and in copied links.
            rest = f"?{urlencode(asked)}" if asked else ""
            answer = RedirectResponse(f"/{scope['path'].lstrip('/')}{rest}", 303)
            answer.set_cookie(cookie, str(self.token), httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, given = headers.get("authorization", "").partition(" ")
        kept = _cookie(headers, cookie)
        if (scheme.lower() == "bearer" and self._is_right(given)) or self._is_right(kept):
            return None
        return PlainTextResponse(f"A token is required: open the address that `{self.site.command}` printed.", 401)

    def _is_right(self, given: str | None) -> bool:
        expected = (self.token or "").encode()
        return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), expected)


def _refuse_foreign(headers: Headers) -> Response | None:
    """For requests that do something: from our own page, or from a program, which says nothing of an origin."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return PlainTextResponse("Send JSON (Content-Type: application/json).", 415)
    origin, host = headers.get("origin"), headers.get("host", "")
    foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
    if foreign or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return PlainTextResponse("This request comes from another site.", 403)
    return None


def _name(host: str) -> str:
    """`localhost:8000` → `localhost`, `[::1]:8000` → `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _cookie(headers: Headers, name: str) -> str | None:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return None
    return jar[name].value if name in jar else None
